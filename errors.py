"""Every error this package raises on purpose. Imports nothing of ours.

KitchenError
├── ConfigError            comfy_kitchen.yaml: unknown key, bad value, unreadable file
├── BackendError           a backend could not do what was asked
│   ├── NoBackendError     a named backend was refused and `backend.fallback` is `none`
│   ├── CaptureError       the network could not be exported
│   ├── BuildError         an engine build failed, was killed or ran out of time
│   │   └── BuildCancelled     ... because the user interrupted it
│   └── EngineError        an engine could not be loaded or run
├── CacheError             the engine cache folder cannot be used
│   └── CacheMiss          no valid entry; names the field that differs
└── HostError              ComfyUI does not offer what the pack needs

A message says what failed, what was got, what is allowed, and the next step to take.
"""

from __future__ import annotations


class KitchenError(Exception):
    """Root of the tree. `str(error)` is the whole message a user should read.

    what: what failed, as a sentence without its full stop.
    got: the offending value, or None.
    allowed: what would have been accepted, or None.
    next_step: what the user can do now, as a sentence without its full stop.
    """

    def __init__(
        self, what: str, *, got: object = None, allowed: str | None = None, next_step: str | None = None
    ) -> None:
        self.what = what
        self.got = got
        self.allowed = allowed
        self.next_step = next_step
        parts = [what.rstrip(".")]
        if got is not None:
            parts.append(f"got {got!r}" if isinstance(got, str) else f"got {got}")
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if next_step is not None:
            parts.append(f"next step: {next_step.rstrip('.')}")
        super().__init__("; ".join(parts) + ".")


class ConfigError(KitchenError):
    """comfy_kitchen.yaml holds an unknown key, a bad value, or cannot be read.

    file: path of the YAML file. line: 1-based line of the fault, or None when it has none.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str,
        line: int | None = None,
        got: object = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.file = file
        self.line = line
        where = file if line is None else f"{file}, line {line}"
        super().__init__(f"{where}: {what}", got=got, allowed=allowed, next_step=next_step)


class BackendError(KitchenError):
    """A backend could not do what was asked of it."""


class NoBackendError(BackendError):
    """The backend the user named was refused and `backend.fallback` is `none`."""


class CaptureError(BackendError):
    """The network could not be exported to a program."""


class BuildError(BackendError):
    """An engine build failed, its process was killed, or it ran out of time."""


class BuildCancelled(BuildError):
    """The user interrupted the build."""


class EngineError(BackendError):
    """An engine could not be loaded or run."""


class CacheError(KitchenError):
    """The engine cache folder cannot be read or written."""


class CacheMiss(CacheError):
    """No valid entry for a key.

    field: the manifest field that differs or is damaged, or `"entry"` when there is none at all.
    """

    def __init__(
        self,
        what: str,
        *,
        field: str,
        got: object = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.field = field
        super().__init__(what, got=got, allowed=allowed, next_step=next_step)


class HostError(KitchenError):
    """ComfyUI does not offer what the pack needs."""
