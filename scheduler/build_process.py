"""One build's child process: start it, follow it, stop its whole tree, and put its end into plain words.

The child prints JSON lines `{"phase": "capture", "fraction": 0.3}` on its standard output and leaves `result.json` and
the folder `out` in the job folder, or `error.json` `{type, message, traceback}`, which may add our errors' parts
`{what, got, allowed, next_step}` and `{disk_full: true}`. Its standard error goes to `child.log`. Its standard input is
a pipe that the parent only holds: end of file there means that the parent died.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import psutil

from ..errors import BuildError, KitchenError

_log = logging.getLogger("kitchen_accel.builds")

JOB_FILE = "job.json"
RESULT_FILE = "result.json"
ERROR_FILE = "error.json"
LOG_FILE = "child.log"
OUT_FOLDER = "out"

PARENT_VARIABLE = "KITCHEN_BUILD_PARENT"
"""Environment variable that tells the child the process id of the server it builds for."""

LOG_LINES = 60
"""Last lines of the child's log that a failure keeps."""

_POLL_S = 0.05
_TREE_POLL_S = 0.25
_KILL_WAIT_S = 0.5
_LINE_BYTES = 64 * 1024
_LOG_TAIL_BYTES = 64 * 1024
_JSON_BYTES = 16 * 1024**2
_PHASE_CHARACTERS = 80
_DISK_FULL_BYTES = 1024**2
_NICE = 10
_NT_ERROR = 0xC0000000
"""Windows exit codes from here on are NTSTATUS errors (0xC0000005 access violation, 0xC0000409 fail fast, ...)."""

_NO_SPACE = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
_NO_SPACE_WINDOWS = {39, 112}
"""ERROR_HANDLE_DISK_FULL and ERROR_DISK_FULL."""

FailureKind = Literal[
    "refused", "stage", "prepare", "start", "child-error", "exit", "killed", "timeout", "memory", "protocol", "commit",
    "disk-full", "internal",
]  # fmt: skip
"""Where a build failed.

refused: its crash mark says it died too often. stage: no job folder (cache read-only). prepare: the job's own
preparation raised. start: the child could not be started. child-error: the child reported an error. exit: it ended
with a code and no report. killed: by a signal or a Windows exception. timeout, memory: we stopped it. protocol: it
ended well and left no result. commit: the cache did not take the engine. disk-full: any of them, for want of space.
internal: a fault of the queue itself.
"""


@dataclass(frozen=True, slots=True)
class BuildFailure:
    """Why a build failed: the four parts of a message, and what is needed to look deeper.

    log_tail: last lines of the child's standard error. traceback: the child's or ours, empty when there is none.
    exit_code: of the child, negative for a signal; None when it never ran.
    """

    kind: FailureKind
    what: str
    got: str | None = None
    allowed: str | None = None
    next_step: str | None = None
    log_tail: tuple[str, ...] = ()
    traceback: str = ""
    exit_code: int | None = None

    @property
    def message(self) -> str:
        """The whole sentence a user should read."""
        return str(self.error())

    def error(self) -> BuildError:
        """The failure as an exception, for callers that asked to wait and have no fallback."""
        return BuildError(self.what, got=self.got, allowed=self.allowed, next_step=self.next_step)


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """How a child ended: with `result`, with `failure`, or cancelled (both None).

    seconds: wall time from start to end. peak_bytes: largest resident memory seen of the whole tree.
    """

    result: dict[str, Any] | None
    failure: BuildFailure | None
    seconds: float
    peak_bytes: int


def disk_full(error: BaseException) -> bool:
    """Whether `error`, or what it was raised from, says that the disk or a quota is full."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, OSError) and (
            link.errno in _NO_SPACE or getattr(link, "winerror", None) in _NO_SPACE_WINDOWS
        ):
            return True
        link = link.__cause__ or link.__context__
    return False


def failure_of(error: Exception, kind: FailureKind, doing: str, next_step: str | None = None) -> BuildFailure:
    """The failure for an exception of our own process; `doing` reads "preparing tiny for openvino"."""
    full = disk_full(error)
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, KitchenError):
        return BuildFailure(
            "disk-full" if full else kind,
            f"{doing} failed: {error.what}",
            None if error.got is None else str(error.got),
            error.allowed,
            error.next_step or (_free_space() if full else next_step),
            traceback=trace,
        )
    text = f"{doing} failed: {type(error).__name__}: {error}"
    return BuildFailure(
        "disk-full" if full else kind, text, next_step=_free_space() if full else next_step, traceback=trace
    )


def run_child(
    command: tuple[str, ...],
    job_dir: Path,
    *,
    subject: str,
    env: Mapping[str, str],
    timeout_s: float,
    memory_ceiling_bytes: int,
    low_priority: bool,
    cancelled: threading.Event,
    on_progress: Callable[[str, float], None],
) -> ChildEnd:
    """Run `command` + the job folder to its end and return how it ended; its whole process tree is gone then.

    subject: for messages, e.g. `"tiny.safetensors for openvino"`. memory_ceiling_bytes: 0 for none.
    low_priority: leave the cores to everybody else.
    on_progress(phase, fraction) is called on this thread, with whatever the child says, clipped to [0, 1].
    Setting `cancelled` ends the child within a fraction of a second. Never raises for what the child does.
    """
    started = time.monotonic()
    try:
        process = _start(command, job_dir, env)
    except (OSError, ValueError) as error:
        failure = failure_of(error, "start", f"starting the build process of {subject}", f"check {command[0]!r}")
        return ChildEnd(None, failure, time.monotonic() - started, 0)
    lines: deque[bytes] = deque(maxlen=512)
    reader = threading.Thread(target=_read_lines, args=(process.stdout, lines), name="kitchen-build-out", daemon=True)
    reader.start()
    stray: deque[str] = deque(maxlen=10)
    tree = _Tree(process)
    stopped: Literal["", "cancelled", "timeout", "memory"] = ""
    try:
        if low_priority:
            tree.lower_priority()
        next_look = 0.0
        while tree.alive() and not stopped:
            if cancelled.wait(_POLL_S):
                stopped = "cancelled"
                break
            now = time.monotonic()
            if now >= next_look:
                tree.look()
                next_look = now + _TREE_POLL_S
            _pass_on(lines, stray, on_progress)
            if now - started > timeout_s:
                stopped = "timeout"
            elif memory_ceiling_bytes and tree.peak_bytes > memory_ceiling_bytes:
                stopped = "memory"
    finally:
        tree.kill()
        reader.join(_KILL_WAIT_S)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
    seconds = time.monotonic() - started
    if stopped == "cancelled":
        return ChildEnd(None, None, seconds, tree.peak_bytes)
    if stopped == "timeout":
        failure = BuildFailure(
            "timeout",
            f"the build of {subject} took too long and was stopped",
            f"{seconds:.0f} s",
            f"at most {timeout_s:.0f} s",
            "raise the time limit in the settings, or close what else keeps this machine busy",
            _log_tail(job_dir),
        )
    elif stopped == "memory":
        failure = BuildFailure(
            "memory",
            f"the build of {subject} used too much memory and was stopped",
            _gib(tree.peak_bytes),
            f"at most {_gib(memory_ceiling_bytes)}",
            "close other programs and raise the memory limit in the settings, or use a smaller model",
            _log_tail(job_dir),
        )
    else:
        _pass_on(lines, stray, on_progress)
        result, ended = _end(process.returncode, job_dir, subject, tree.peak_bytes, tuple(stray))
        return ChildEnd(result, ended, seconds, tree.peak_bytes)
    return ChildEnd(None, failure, seconds, tree.peak_bytes)


def remove_folder(folder: Path, patience_s: float = 2.0) -> None:
    """Remove a job folder; waits a little for sharing violations (virus scanners on Windows), then logs and leaves it.

    What is left lies in the store's staging area and can never be taken for an entry.
    """
    delay_s, deadline = 0.02, time.monotonic() + patience_s
    while True:
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError as error:
            if time.monotonic() > deadline:
                _log.warning("the build folder %s cannot be removed now: %s", folder, error)
                return
        time.sleep(delay_s)
        delay_s = min(delay_s * 2, 0.3)


def _start(command: tuple[str, ...], job_dir: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # the child's log is read as UTF-8 whatever the console's code page is; our own variable is not for overriding
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", **env, PARENT_VARIABLE: str(os.getpid())}
    # apart from the console's process group: Ctrl-C is for the server, which then ends the build itself
    if sys.platform == "win32":
        flags, session = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW, False
    else:
        flags, session = 0, True
    with (job_dir / LOG_FILE).open("ab") as log:
        return subprocess.Popen(
            [*command, str(job_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            creationflags=flags,
            start_new_session=session,
        )


class _Tree:
    """The child and every process that was ever seen below it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.peak_bytes = 0
        self._process = process
        # keyed by identity, not by number alone: psutil refuses to touch a number that was given away again
        self._seen: set[psutil.Process] = set()
        with contextlib.suppress(psutil.Error):
            self._seen.add(psutil.Process(process.pid))

    def alive(self) -> bool:
        """Whether the child itself still runs."""
        if sys.platform != "win32" and hasattr(os, "waitid"):
            # looks without collecting, so that the group's number stays the child's until `kill` has used it
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        return self._process.poll() is None

    def lower_priority(self) -> None:
        """The prompt that runs meanwhile goes first."""
        for process in tuple(self._seen):
            with contextlib.suppress(psutil.Error, OSError):
                if sys.platform == "win32":
                    process.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
                else:
                    process.nice(max(_NICE, int(process.nice())))

    def look(self) -> None:
        """Note new descendants and the tree's resident memory."""
        for process in tuple(self._seen):
            with contextlib.suppress(psutil.Error):
                self._seen.update(process.children(recursive=True))
        total = 0
        for process in tuple(self._seen):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                if process.pid != self._process.pid:
                    self._seen.discard(process)
            except psutil.Error:
                continue
        self.peak_bytes = max(self.peak_bytes, total)

    def kill(self) -> None:
        """End all of them and wait until they are gone, at most about a second."""
        for process in tuple(self._seen):
            with contextlib.suppress(psutil.Error):
                self._seen.update(process.children(recursive=True))
        if sys.platform != "win32" and self._process.returncode is None:
            # not yet waited for, so that the number is still the child's: it led its own group
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                if process.pid != self._process.pid:
                    process.kill()
        with contextlib.suppress(OSError):
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_WAIT_S)
        others = [p for p in self._seen if p.pid != self._process.pid]
        psutil.wait_procs(others, timeout=_KILL_WAIT_S)


def _read_lines(stream: IO[bytes] | None, lines: deque[bytes]) -> None:
    if stream is None:
        return
    with stream, contextlib.suppress(OSError, ValueError):
        # bounded lines: a child that prints a gigabyte without a line break must not take the server along
        while line := stream.readline(_LINE_BYTES):
            lines.append(line)


def _pass_on(lines: deque[bytes], stray: deque[str], on_progress: Callable[[str, float], None]) -> None:
    # at most one turn's worth, so that a flood of lines cannot keep the caller from its other duties
    for _ in range(len(lines)):
        line = lines.popleft()
        step = _parse(line)
        if step is None:
            stray.append(line[:200].decode("utf-8", "replace").strip())
        else:
            on_progress(*step)


def _parse(line: bytes) -> tuple[str, float] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict):
        return None
    phase, fraction = message.get("phase"), message.get("fraction")
    if not isinstance(phase, str) or isinstance(fraction, bool) or not isinstance(fraction, int | float):
        return None
    if not math.isfinite(fraction):
        return None
    return phase[:_PHASE_CHARACTERS], min(1.0, max(0.0, float(fraction)))


def _end(
    code: int, job_dir: Path, subject: str, peak_bytes: int, stray: tuple[str, ...]
) -> tuple[dict[str, Any] | None, BuildFailure | None]:
    """Result or failure of a child that ended by itself."""
    tail = _log_tail(job_dir)
    if code == 0:
        result, fault = _read_json(job_dir / RESULT_FILE)
        if result is not None and (job_dir / OUT_FOLDER).is_dir():
            return result, None
        kind: FailureKind = "protocol"
        what = f"the build process of {subject} ended without an error and left no engine"
        got: str | None = fault or f"no folder {OUT_FOLDER!r}"
        if stray:
            got = f"{got}; it printed {stray[-1]!r}"
        allowed: str | None = f"a file {RESULT_FILE} and a folder {OUT_FOLDER!r}"
        step = "report this with the lines of the log: the build program does not keep its own rules"
        trace = ""
    elif (report := _read_json(job_dir / ERROR_FILE)[0]) is not None:
        kind = "disk-full" if report.get("disk_full") is True else "child-error"
        reason = _text(report, "what") or ": ".join(filter(None, (_text(report, "type"), _text(report, "message"))))
        what = f"the build of {subject} failed: {reason or 'no reason given'}"
        got, allowed, trace = _text(report, "got"), _text(report, "allowed"), _text(report, "traceback") or ""
        step = _free_space() if kind == "disk-full" else _text(report, "next_step") or "read the traceback in the log"
    elif code < 0 or code >= _NT_ERROR:
        kind = "killed"
        what = f"the build process of {subject} was killed or crashed"
        got, allowed, trace = f"{_code_text(code)}, largest memory use seen {_gib(peak_bytes)}", None, ""
        step = _crash_step(code)
    else:
        kind = "exit"
        what = f"the build process of {subject} ended at once and told no reason"
        got, allowed, trace = f"exit code {code}", "exit code 0", ""
        step = "read the last lines of its log"
    if _full(job_dir):
        kind, step = "disk-full", _free_space()
    return None, BuildFailure(kind, what, got, allowed, step, tail, trace, code)


def _text(report: Mapping[str, Any], name: str) -> str | None:
    value = report.get(name)
    return value if isinstance(value, str) and value else None


def _code_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code:#x}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _crash_step(code: int) -> str:
    if _code_text(code) in ("SIGKILL", "SIGTERM"):
        return "the system was probably out of memory, or somebody ended it: close other programs and try again"
    return "a native library crashed: update the backend's library, or switch this backend off in the settings"


def _free_space() -> str:
    return "make room on the disk of the engine cache, or move the cache in the settings"


def _full(folder: Path) -> bool:
    # a child on a full disk may not even be able to write down why it failed
    try:
        return shutil.disk_usage(folder).free < _DISK_FULL_BYTES
    except OSError:
        return False


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 1024**3:.2f} GiB"


def _read_json(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The JSON object in `path`, or None and what is wrong with it."""
    try:
        if path.stat().st_size > _JSON_BYTES:
            return None, f"{path.name} of more than {_JSON_BYTES} bytes"
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, f"no {path.name}"
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} that cannot be read ({error})"
    if not isinstance(content, dict):
        return None, f"{path.name} without a JSON object"
    return content, ""


def _log_tail(job_dir: Path) -> tuple[str, ...]:
    try:
        with (job_dir / LOG_FILE).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-LOG_LINES:])
