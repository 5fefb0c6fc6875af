"""Crash marks: small files that remember, across restarts, that a build killed its process.

A mark is written before a build starts and taken away when it ends, so it stays when the whole server dies with the
build (out of memory takes the largest process, and that is often the server). Two deaths, and the build is refused
until the mark is removed or a week old: else every start of the server would run into the same wall.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pydantic

_log = logging.getLogger("kitchen_accel.builds")

CRASH_LIMIT = 2
"""Deaths after which a build is refused: one may be an accident, two are a habit."""

MARK_MAX_AGE_S = 7 * 24 * 3600.0
"""Seconds after which a mark no longer counts: drivers, memory and libraries change within a week."""

_FORMAT = 1
_SAME_PROCESS_S = 2.0
"""Process start times are read with the clock's own jitter; equal within this many seconds is the same process."""


@dataclass(frozen=True, slots=True)
class CrashMark:
    """One mark as it lies on disk, in UTF-8 JSON.

    attempts: builds that died, plus the one that runs while `pid` is not 0.
    updated: seconds since the epoch.
    machine, pid, pid_started: the server process whose build runs; empty and 0 once it ended.
    """

    key_digest: str
    label: str
    attempts: int
    last_error: str
    updated: float
    machine: str = ""
    pid: int = 0
    pid_started: float = 0.0
    format: int = _FORMAT

    @property
    def running(self) -> bool:
        """Whether the build runs this moment in a living process of this machine, so that nothing has died yet."""
        if not self.pid or self.machine != _machine():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.pid_started) < _SAME_PROCESS_S
        except psutil.Error:
            return False

    @property
    def crashes(self) -> int:
        """Builds of this key that are known to have died."""
        return self.attempts - 1 if self.running else self.attempts

    @property
    def barred(self) -> bool:
        """Whether this key died too often to be tried again."""
        return self.crashes >= CRASH_LIMIT


class CrashMarks:
    """The marks in one folder; with `None` there are none and every method does nothing.

    A folder that cannot be written costs the protection, never the build: that is logged and the build goes on.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def path(self, key_digest: str) -> Path | None:
        """`<folder>/<first 20 characters of the digest>.json`."""
        return None if self._folder is None else self._folder / f"{key_digest[:20]}.json"

    def read(self, key_digest: str) -> CrashMark | None:
        """The mark of this key, or None where there is none that counts: too old, unreadable, of another key."""
        path = self.path(key_digest)
        if path is None:
            return None
        try:
            mark = pydantic.TypeAdapter(CrashMark).validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, pydantic.ValidationError) as error:
            _log.warning("crash mark %s cannot be read and is not counted: %s", path, error)
            return None
        age_s = time.time() - mark.updated
        # a date in the future is a clock that was wrong; it must not bar a build for years
        if mark.format != _FORMAT or mark.key_digest != key_digest or not -MARK_MAX_AGE_S < age_s < MARK_MAX_AGE_S:
            return None
        return mark

    def begin(self, key_digest: str, label: str) -> CrashMark | None:
        """Write the mark of a build that starts now; returns the mark that was there, to be handed to the end."""
        prior = self.read(key_digest)
        crashes = 0 if prior is None else prior.crashes
        self._write(
            CrashMark(
                key_digest=key_digest,
                label=label,
                attempts=crashes + 1,
                # stays only when nobody lives to write a better reason
                last_error="the server ended while this build ran",
                updated=time.time(),
                machine=_machine(),
                pid=os.getpid(),
                pid_started=psutil.Process().create_time(),
            )
        )
        return None if prior is None or crashes < 1 else replace(prior, attempts=crashes, machine="", pid=0)

    def crashed(self, key_digest: str, label: str, prior: CrashMark | None, error: str) -> None:
        """The build that began died: keep the mark, with what is known of the death."""
        attempts = 1 if prior is None else prior.attempts + 1
        self._write(CrashMark(key_digest, label, attempts, error, time.time()))

    def restore(self, key_digest: str, prior: CrashMark | None) -> None:
        """The build ended some other way (cancelled, disk full, an error it reported): as if it had never begun."""
        if prior is None:
            self.clear(key_digest)
        else:
            self._write(prior)

    def clear(self, key_digest: str) -> None:
        """Remove the mark: the build is known to work."""
        path = self.path(key_digest)
        if path is not None:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("crash mark %s cannot be removed: %s", path, error)

    def _write(self, mark: CrashMark) -> None:
        path = self.path(mark.key_digest)
        if path is None:
            return
        # several servers may share the folder: each writes its own temporary file
        part = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(pydantic.TypeAdapter(CrashMark).dump_json(mark, indent=1))
            part.replace(path)
        except OSError as error:
            _log.warning("crash mark %s cannot be written, so a crash will not be remembered: %s", path, error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


def _machine() -> str:
    """Tells the machines that share a folder apart without writing their names down."""
    return hashlib.sha256(platform.node().encode("utf-8", "replace")).hexdigest()[:16]
