"""The build queue: one engine build at a time, each in a process of its own.

A build that crashes, hangs or eats the memory takes nothing with it, and it can be cancelled at any moment by killing
its process. The host hands in what only it can do (weights, job folder, the cache's commit) as callables of a
`BuildJob`, so that everything here runs without ComfyUI.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..backends.base import BackendId
from ..errors import BuildCancelled, BuildError
from .build_process import JOB_FILE, OUT_FOLDER, BuildFailure, failure_of, remove_folder, run_child
from .crash_marks import MARK_MAX_AGE_S, CrashMark, CrashMarks

__all__ = ["BuildEvent", "BuildFailure", "BuildJob", "BuildQueue", "BuildState", "BuildTicket"]

_log = logging.getLogger("kitchen_accel.builds")

BuildStatus = Literal["queued", "preparing", "building", "done", "failed", "cancelled"]

_ETA_FROM = 0.05
"""Fraction below which a remaining time would be a guess."""

_CANCEL_WAIT_S = 0.8
"""How long `wait` stays for the clean-up after an interrupt; more would be felt as a hang."""

_CLOSE_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class BuildJob:
    """One engine to build.

    key_digest: digest of the engine's key, 20 to 128 lower-case hexadecimal digits. Raises ValueError otherwise.
    label: for people, e.g. the checkpoint's file name.
    spec: JSON-able; becomes `job.json`, normally `child.JobSpec.to_json()`.
    prepare(job_dir, cancelled): called on the queue's thread; writes what the child needs, e.g. `weights.safetensors`.
        It should ask `cancelled()` between pieces and return or raise when it says True.
    command: argv prefix of the child; the job folder is appended.
    env: environment variables over those of this process.
    stage(): makes an empty job folder, normally `EngineStore.stage`.
    commit(out_dir, result, build_s): takes the built files over (normally moves them into the cache). `result` is the
        child's `result.json`, `build_s` the seconds its process ran.
    timeout_s: longest time the child may take, in seconds.
    memory_ceiling_bytes: largest resident memory of the child's process tree; 0 for no limit.
    low_priority: leave the cores to everybody else; not for a build somebody waits for.
    """

    key_digest: str
    backend: BackendId
    label: str
    spec: Mapping[str, Any]
    prepare: Callable[[Path, Callable[[], bool]], None]
    command: tuple[str, ...]
    env: Mapping[str, str]
    stage: Callable[[], Path]
    commit: Callable[[Path, dict[str, Any], float], None]
    timeout_s: float
    memory_ceiling_bytes: int = 0
    low_priority: bool = True

    def __post_init__(self) -> None:
        # it becomes a file name
        if not re.fullmatch(r"[0-9a-f]{20,128}", self.key_digest):
            raise ValueError(f"key_digest: got {self.key_digest!r}, allowed: 20 to 128 lower-case hexadecimal digits")
        if not self.command:
            raise ValueError("command: got nothing, allowed: the program that builds and its arguments")

    @property
    def subject(self) -> str:
        """`tiny.safetensors for openvino`: for messages."""
        return f"{self.label} for {self.backend}"


@dataclass(frozen=True, slots=True)
class BuildState:
    """What is known of one build at one moment.

    phase: the child's own word for what it does, e.g. `"capture"`; empty before it said one.
    fraction: done so far, in [0, 1], never falling.
    eta_s: estimated seconds left; None while there is too little to go by and after the end.
    elapsed_s: seconds since the work began; 0 while queued; the whole duration after the end.
    failure: only when failed.
    """

    key_digest: str
    backend: BackendId
    label: str
    status: BuildStatus
    phase: str = ""
    fraction: float = 0.0
    eta_s: float | None = None
    elapsed_s: float = 0.0
    failure: BuildFailure | None = None

    @property
    def ended(self) -> bool:
        return self.status in ("done", "failed", "cancelled")

    @property
    def text(self) -> str:
        """`building, capture, 35 %, about 120 s left`: for people."""
        if self.failure is not None:
            return self.failure.message
        if self.status != "building":
            return self.status
        parts = ["building", *([self.phase] if self.phase else []), f"{self.fraction:.0%}"]
        return ", ".join(parts if self.eta_s is None else [*parts, f"about {max(1, round(self.eta_s))} s left"])


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something happened to a build. step: the status changed; otherwise only progress was made."""

    state: BuildState
    step: bool


@dataclass(slots=True, eq=False)
class _Entry:
    """The queue's own record of one job; guarded by the queue's lock, except for the two events."""

    job: BuildJob
    status: BuildStatus = "queued"
    phase: str = ""
    fraction: float = 0.0
    failure: BuildFailure | None = None
    began: float = 0.0
    child_began: float = 0.0
    elapsed_s: float = 0.0
    cancel: threading.Event = field(default_factory=threading.Event)
    finished: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class BuildTicket:
    """A submitted job; hand it to `BuildQueue.wait`."""

    key_digest: str
    _entry: _Entry = field(repr=False)


class BuildQueue:
    """Builds one job after the other on a thread of its own, which starts with the first job.

    on_event: called on every change, without any lock held: `queued` on the submitting thread, `cancelled` of a job
        that had not begun on the cancelling one, everything else on the queue's thread. What it raises is logged.
    markers: folder of the crash marks (see `crash_marks`); None for none.

    Safe to use from any thread.
    """

    def __init__(self, on_event: Callable[[BuildEvent], None], *, markers: Path | None = None) -> None:
        self._on_event = on_event
        self._marks = CrashMarks(markers)
        self._changed = threading.Condition()
        self._entries: dict[str, _Entry] = {}
        self._waiting: deque[_Entry] = deque()
        self._running: _Entry | None = None
        self._worker: threading.Thread | None = None
        self._closed = False

    def submit(self, job: BuildJob) -> BuildTicket:
        """Queue `job`. A key that is queued, running or failed gives back its ticket and changes nothing.

        A key that was done or cancelled is built again (its engine may have been evicted). A failed one is built again
        only after `forget`, or when it was refused for its crash mark and that is gone. Raises BuildError when the
        queue is closed.
        """
        with self._changed:
            if self._closed:
                raise BuildError(
                    f"the build of {job.subject} was not started: the build queue is closed",
                    next_step="restart ComfyUI",
                )
            old = self._entries.get(job.key_digest)
            if old is not None and not self._replaceable(old):
                return BuildTicket(job.key_digest, old)
            entry = self._entries[job.key_digest] = _Entry(job)
        self._emit(entry, step=True)
        with self._changed:
            if not self._closed:
                self._waiting.append(entry)
                self._ensure_worker()
                self._changed.notify_all()
        return BuildTicket(job.key_digest, entry)

    def state(self, key_digest: str) -> BuildState | None:
        """The newest build of this key, or None when there was none."""
        with self._changed:
            entry = self._entries.get(key_digest)
            return None if entry is None else self._snapshot(entry)

    def states(self) -> tuple[BuildState, ...]:
        """All builds that are remembered, oldest first."""
        with self._changed:
            return tuple(self._snapshot(entry) for entry in self._entries.values())

    def cancel(self, key_digest: str | None = None) -> None:
        """Cancel one build, or all with None; returns at once. The process is dead and its files gone in < 1 s."""
        with self._changed:
            chosen = [e for k, e in self._entries.items() if key_digest is None or k == key_digest]
        for entry in chosen:
            self._cancel_entry(entry)

    def forget(self, key_digest: str) -> None:
        """Forget an ended build, so that a failed key may be tried again. Its crash mark on disk stays."""
        with self._changed:
            entry = self._entries.get(key_digest)
            if entry is not None and entry.status in ("done", "failed", "cancelled"):
                del self._entries[key_digest]

    def wait(self, ticket: BuildTicket, poll: Callable[[], None], interval_s: float = 0.1) -> BuildState:
        """Wait for the build's end and return its last state; call `poll` every `interval_s` seconds meanwhile.

        Whatever `poll` raises cancels the build and goes on to the caller, after the clean-up and in any case in less
        than a second (a `prepare` that does not look at its `cancelled` is not waited for longer).
        """
        entry = ticket._entry
        try:
            while not entry.finished.wait(interval_s):
                poll()
        except BaseException:
            self._cancel_entry(entry)
            entry.finished.wait(_CANCEL_WAIT_S)
            raise
        with self._changed:
            return self._snapshot(entry)

    def close(self) -> None:
        """Cancel everything, kill the child and end the thread. Waits at most a few seconds; may be called twice."""
        with self._changed:
            self._closed = True
            worker, running = self._worker, self._running
            self._changed.notify_all()
        if running is not None:
            # it is not in the entries any more when a newer build of its key waits behind it
            self._cancel_entry(running)
        self.cancel(None)
        if worker is not None:
            atexit.unregister(self.close)
            if worker is not threading.current_thread():
                worker.join(_CLOSE_WAIT_S)

    def _cancel_entry(self, entry: _Entry) -> None:
        # by entry, not by key: the key may meanwhile belong to a newer build
        with self._changed:
            dropped = entry.status == "queued"
            if dropped:
                entry.status = "cancelled"
            # one that ended stays as it ended: a failure is not to be retried because somebody cancelled all
            if entry.status in ("preparing", "building"):
                entry.cancel.set()
        if dropped:
            self._emit(entry, step=True)
            entry.finished.set()

    def _replaceable(self, entry: _Entry) -> bool:
        if entry.failure is not None and entry.failure.kind == "refused":
            mark = self._marks.read(entry.job.key_digest)
            return mark is None or not mark.barred
        # one that is being cancelled cannot come back: the new one waits behind it
        return entry.status in ("done", "cancelled") or entry.cancel.is_set()

    def _ensure_worker(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="kitchen-builds", daemon=True)
            self._worker.start()
            # an orderly end of the server is no crash: kill the child, remove its files and its mark
            atexit.register(self.close)

    def _snapshot(self, entry: _Entry) -> BuildState:
        job, now, eta_s = entry.job, time.monotonic(), None
        active = entry.status in ("preparing", "building")
        if entry.status == "building" and entry.fraction > _ETA_FROM:
            eta_s = (now - entry.child_began) * (1.0 - entry.fraction) / entry.fraction
        elapsed_s = now - entry.began if active else entry.elapsed_s
        return BuildState(
            job.key_digest, job.backend, job.label, entry.status, entry.phase, entry.fraction, eta_s, elapsed_s,
            entry.failure,
        )  # fmt: skip

    def _emit(self, entry: _Entry, *, step: bool) -> None:
        with self._changed:
            event = BuildEvent(self._snapshot(entry), step)
        try:
            self._on_event(event)
        except Exception:
            _log.exception("a listener of the build queue failed on %s", event.state.text)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                entry = self._waiting.popleft()
                if entry.status != "queued":
                    continue
                entry.status, entry.began = "preparing", time.monotonic()
                self._running = entry
            self._emit(entry, step=True)
            status: BuildStatus = "failed"
            failure: BuildFailure | None = None
            try:
                failure = self._attempt(entry)
                status = "done" if failure is None else "failed"
            except BuildCancelled:
                status = "cancelled"
            except Exception as error:
                failure = failure_of(error, "internal", f"building {entry.job.subject}", "report this with the log")
            with self._changed:
                entry.elapsed_s = time.monotonic() - entry.began
                entry.status, entry.failure = status, failure
                if status == "done":
                    entry.fraction = 1.0
                self._running = None
            self._emit(entry, step=True)
            entry.finished.set()

    def _attempt(self, entry: _Entry) -> BuildFailure | None:
        """Build in a fresh job folder that is gone afterwards, under a crash mark. Raises BuildCancelled."""
        job = entry.job
        mark = self._marks.read(job.key_digest)
        if mark is not None and mark.barred:
            return self._refused(job, mark)
        self._check(entry)
        try:
            job_dir = job.stage()
        except Exception as error:
            step = "check that the cache folder of the settings can be written"
            return failure_of(error, "stage", f"making a folder to build {job.subject} in", step)
        prior = self._marks.begin(job.key_digest, job.label)
        failure: BuildFailure | None = None
        done = False
        try:
            failure = self._attempt_in(entry, job_dir)
            done = failure is None
        finally:
            remove_folder(job_dir)
            if done:
                self._marks.clear(job.key_digest)
            elif failure is not None and failure.kind == "killed":
                self._marks.crashed(job.key_digest, job.label, prior, failure.message)
            else:
                self._marks.restore(job.key_digest, prior)
        return failure

    def _attempt_in(self, entry: _Entry, job_dir: Path) -> BuildFailure | None:
        job = entry.job
        self._check(entry)
        try:
            (job_dir / JOB_FILE).write_text(json.dumps(dict(job.spec), allow_nan=False), encoding="utf-8")
            job.prepare(job_dir, entry.cancel.is_set)
        except BuildCancelled:
            raise
        except Exception as error:
            # what it raises when told to stop is no failure
            self._check(entry)
            return failure_of(error, "prepare", f"preparing the build of {job.subject}", "read the log")
        with self._changed:
            entry.status, entry.child_began = "building", time.monotonic()
        self._check(entry)
        self._emit(entry, step=True)
        end = run_child(
            job.command,
            job_dir,
            subject=job.subject,
            env=job.env,
            timeout_s=job.timeout_s,
            memory_ceiling_bytes=job.memory_ceiling_bytes,
            low_priority=job.low_priority,
            cancelled=entry.cancel,
            on_progress=lambda phase, fraction: self._progress(entry, phase, fraction),
        )
        self._check(entry)
        if end.result is None:
            return end.failure
        try:
            job.commit(job_dir / OUT_FOLDER, end.result, end.seconds)
        except Exception as error:
            return failure_of(error, "commit", f"storing the engine of {job.subject}", "check the cache folder")
        return None

    def _check(self, entry: _Entry) -> None:
        if entry.cancel.is_set():
            raise BuildCancelled(f"the build of {entry.job.subject} was cancelled")

    def _progress(self, entry: _Entry, phase: str, fraction: float) -> None:
        with self._changed:
            fraction = max(entry.fraction, fraction)
            if (phase, fraction) == (entry.phase, entry.fraction):
                return
            entry.phase, entry.fraction = phase, fraction
        self._emit(entry, step=False)

    def _refused(self, job: BuildJob, mark: CrashMark) -> BuildFailure:
        return BuildFailure(
            "refused",
            f"the build of {job.subject} is not tried again: it ended with its process killed or crashed",
            f"{mark.crashes} times, last: {mark.last_error}",
            None,
            f"remove {self._marks.path(job.key_digest)} to try again now, or wait: after "
            f"{MARK_MAX_AGE_S / 86400:.0f} days it is tried by itself",
        )
