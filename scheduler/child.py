"""The build process: reads `job.json`, builds one engine with one backend, leaves `result.json` or `error.json`.

The host's script makes ComfyUI importable, then calls `main` with a function that makes the network. Nothing here knows
ComfyUI. The protocol is the one of `build_process`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import psutil
import pydantic

from ..backends.base import BackendId, BuildOptions, BuildResult, ShapeProfile
from ..errors import BuildError, KitchenError
from .build_process import ERROR_FILE, JOB_FILE, OUT_FOLDER, PARENT_VARIABLE, RESULT_FILE, disk_full

__all__ = ["JobSpec", "MakeModule", "main", "result_from_json", "result_to_json", "watch_parent"]

JOB_FORMAT = 1
"""Raised whenever a field of `JobSpec` changes its meaning; parent and child are always the same checkout."""

EXIT_FAILED = 1
EXIT_ORPHANED = 3
"""Exit codes: failed with an `error.json`; the parent died."""

_LOAD_SHARE = 0.05
"""Share of the whole progress given to making the network; the rest is the backend's."""

_STRICT = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

MakeModule = Callable[[dict[str, Any], Path], tuple[Any, Mapping[str, Any]]]
"""`make_module(network, job_dir) -> (module, example)`: a `torch.nn.Module` in eval mode with its weights, and example
inputs by name. `network` is the spec's, `job_dir` holds what the job's `prepare` wrote."""


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything the child is told.

    network: JSON-able, handed to `make_module` as it is.
    threads: CPU threads for torch; 0 leaves torch's own default.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    backend: BackendId
    profile: ShapeProfile
    options: BuildOptions
    network: dict[str, Any] = field(default_factory=dict)
    threads: int = 0
    format: int = JOB_FORMAT

    def to_json(self) -> dict[str, Any]:
        """As a JSON-able dict; `from_json` gives back an equal spec."""
        content: dict[str, Any] = pydantic.TypeAdapter(JobSpec).dump_python(self, mode="json")
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> JobSpec:
        """Raises BuildError naming the first field that is wrong."""
        if content.get("format") != JOB_FORMAT:
            raise BuildError(
                "the build job has another format",
                got=repr(content.get("format")),
                allowed=str(JOB_FORMAT),
                next_step="restart ComfyUI: the pack was updated while it ran",
            )
        try:
            spec = pydantic.TypeAdapter(JobSpec).validate_json(json.dumps(dict(content)))
        except pydantic.ValidationError as error:
            raise _invalid("the build job", error) from error
        if spec.threads < 0:
            raise BuildError("the build job's threads are wrong", got=spec.threads, allowed="0 or more")
        return spec


@dataclass(frozen=True, slots=True)
class _ResultFile:
    """Nests the result, so that unknown fields are refused in it too."""

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    result: BuildResult


def result_to_json(result: BuildResult) -> dict[str, Any]:
    """As a JSON-able dict. Raises BuildError when a backend left something that is none, e.g. an infinite figure."""
    content: dict[str, Any] = pydantic.TypeAdapter(BuildResult).dump_python(result, mode="json", warnings="error")
    result_from_json(content)
    return content


def result_from_json(content: Mapping[str, Any]) -> BuildResult:
    """The BuildResult in a child's `result.json`. Raises BuildError naming the first field that is wrong."""
    try:
        text = json.dumps({"result": dict(content)})
        return pydantic.TypeAdapter(_ResultFile).validate_json(text).result
    except pydantic.ValidationError as error:
        raise _invalid("the result of the build", error) from error


def main(job_dir: Path, make_module: MakeModule, *, watch: bool = True) -> int:
    """Build what `<job_dir>/job.json` asks for into `<job_dir>/out`; returns the exit code.

    watch: end this process when the parent dies. For a build run by hand it is False.
    Every exception becomes `error.json` and a traceback on standard error; nothing is raised. The caller should end
    with `os._exit(main(...))` after flushing: native libraries sometimes crash while an interpreter shuts down, and
    the result is complete by then.
    """
    with _protocol() as emit:
        if watch:
            watch_parent()
        try:
            _build(job_dir, make_module, emit)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            return _report(job_dir, error)
    return 0


def watch_parent() -> None:
    """End this process at once when its parent dies, however it dies.

    On POSIX a thread reads standard input, which the parent holds open, until its end. On Linux the kernel is asked
    as well, because that also works while a library keeps Python's lock. On Windows a thread waits for the parent's
    process instead: there a pending read of standard input blocks the loading of some libraries.
    """
    if sys.platform == "linux":
        _die_with_parent()
    by_number = sys.platform == "win32" and PARENT_VARIABLE in os.environ
    target = _exit_with_parent if by_number else _exit_at_end_of_input
    threading.Thread(target=target, name="kitchen-watch", daemon=True).start()


def _exit_at_end_of_input() -> NoReturn:
    with suppress(OSError):
        # the bare descriptor: a thread inside sys.stdin's lock would break the interpreter's shutdown
        while os.read(0, 4096):
            pass
    os._exit(EXIT_ORPHANED)


def _exit_with_parent() -> NoReturn:
    with suppress(psutil.Error, ValueError):
        psutil.Process(int(os.environ[PARENT_VARIABLE])).wait()
    os._exit(EXIT_ORPHANED)


def _die_with_parent() -> None:
    import ctypes

    pr_set_pdeathsig, sigkill = 1, 9  # linux/prctl.h, signal(7)
    try:
        # bound to the parent's *thread*: the build queue's own, which outlives every child
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, sigkill, 0, 0, 0)
    except (OSError, AttributeError):
        return  # the thread on standard input remains


@contextmanager
def _protocol() -> Iterator[Callable[[str, float], None]]:
    """Keep standard output for the protocol: whatever else prints there, from C too, goes to standard error."""
    sys.stdout.flush()
    channel = os.dup(1)
    os.dup2(2, 1)
    last = 0.0

    def emit(phase: str, fraction: float) -> None:
        nonlocal last
        last = max(last, min(1.0, fraction))
        line = json.dumps({"phase": phase, "fraction": round(last, 4)}) + "\n"
        # one write: a line of this length arrives whole
        os.write(channel, line.encode())

    try:
        # Python's own prints too, in order with the rest of the log instead of after it
        with redirect_stdout(sys.stderr):
            yield emit
    finally:
        os.dup2(channel, 1)
        os.close(channel)


def _build(job_dir: Path, make_module: MakeModule, emit: Callable[[str, float], None]) -> None:
    began = time.monotonic()
    spec = _read_spec(job_dir)
    emit("load", 0.0)
    if spec.threads:
        import torch

        torch.set_num_threads(spec.threads)
    from .. import backends

    backend = backends.create(spec.backend)
    module, example = make_module(spec.network, job_dir)
    emit("load", _LOAD_SHARE)
    out = job_dir / OUT_FOLDER
    out.mkdir(exist_ok=True)
    result = backend.build(
        module,
        example,
        spec.profile,
        spec.options,
        out,
        lambda phase, fraction: emit(phase, _LOAD_SHARE + (1.0 - _LOAD_SHARE) * fraction),
    )
    if not any(out.iterdir()):
        raise BuildError(f"the backend {spec.backend} reported an engine and wrote no file", next_step="report this")
    content = result_to_json(result)
    emit("finish", 1.0)
    sys.stderr.write(f"built in {time.monotonic() - began:.1f} s\n")
    _write_json(job_dir / RESULT_FILE, content)


def _read_spec(job_dir: Path) -> JobSpec:
    path = job_dir / JOB_FILE
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BuildError(f"the build job cannot be read: {error}", next_step="start the build again") from error
    if not isinstance(content, dict):
        raise BuildError("the build job is no JSON object", got=type(content).__name__, next_step="report this")
    return JobSpec.from_json(content)


def _report(job_dir: Path, error: Exception) -> int:
    report: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "disk_full": disk_full(error),
    }
    if isinstance(error, KitchenError):
        got = None if error.got is None else str(error.got)
        report |= {"what": error.what, "got": got, "allowed": error.allowed, "next_step": error.next_step}
    try:
        _write_json(job_dir / ERROR_FILE, report)
    except OSError as second:
        # a full disk takes no report either; the parent then sees the exit code and the log
        sys.stderr.write(f"{ERROR_FILE} cannot be written: {second}\n")
    return EXIT_FAILED


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    # whole or not at all: the parent may look at any moment
    part = path.with_name(path.name + ".tmp")
    part.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
    part.replace(path)


def _invalid(what: str, error: pydantic.ValidationError) -> BuildError:
    first = error.errors(include_url=False)[0]
    return BuildError(
        f"{what} is not valid at {'.'.join(map(str, first['loc'])) or 'its top'}: {first['msg']}",
        got=repr(first["input"])[:200],
        next_step="restart ComfyUI; if it stays, report it: parent and build process disagree",
    )
