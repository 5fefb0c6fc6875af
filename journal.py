"""What was decided, built, run, refused and freed: `kitchen.log` for people, `kitchen.jsonl` for machines.

Keeping a journal never fails a prompt: whatever goes wrong with the files is said once, in the log of the process.
The standard library's rotating handlers are not used, because two ComfyUI servers may share the folder: they keep the
file open, which corrupts a rotation by another process on Linux and forbids it on Windows. Here each event opens,
appends and closes under a lock file; events are rare (a decision is written once per change).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from datetime import datetime, timezone
from enum import Enum
from math import isfinite
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, Final, Literal

import filelock

Level = Literal["debug", "info", "warning", "error"]

LOG_NAME = "kitchen.log"
"""The file for people: a line per event, continuation lines indented, local time."""

JSONL_NAME = "kitchen.jsonl"
"""The file for machines: a JSON object per line with `ts` (ISO 8601, UTC), `kind`, `level`, `message`, `pid` and the
event's own fields. An own field with one of these names gets a trailing underscore."""

_LOCK_NAME = "kitchen.lock"

_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_LOCK_WAIT_S = 0.2
"""Longest an event waits for another process; then it is appended without the lock, and without rotating."""

_PENDING = 200
"""Events kept in memory while a file cannot be written; older ones are dropped."""

_REMEMBERED = 4096
"""Keys `once` remembers; the one unused for longest is forgotten first, and would be written again."""

_MAX_TEXT = 100_000
"""Characters of a single text in the JSON file: every real message and traceback, but no runaway."""

_MAX_ITEMS = 1_000
"""Items of a single list or mapping in the JSON file."""

_MAX_VALUES = 20_000
"""Values of an event in the JSON file, all fields together."""

_MAX_DEPTH = 12
"""Nesting of a field in the JSON file; also what ends a value that contains itself."""

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
"""Control characters as people may see them: a terminal that shows the log never obeys them."""


class _RollingFile:
    """One append-only file of whole lines, `name` -> `name.1` -> ... -> `name.<keep>`. The caller locks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: deque[bytes] = deque(maxlen=_PENDING)

    def append(self, line: bytes, limit_bytes: int, keep: int, *, rotate: bool) -> None:
        """Append `line`, and whatever could not be written before. Raises OSError; the lines are then kept for later.

        rotate: whether the caller holds the lock of the folder.
        """
        self._pending.append(line)
        self.flush(limit_bytes, keep, rotate=rotate)

    def flush(self, limit_bytes: int, keep: int, *, rotate: bool) -> None:
        """Write the pending lines in a single write. Raises OSError."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        if rotate:
            self._rotate(limit_bytes - len(data), keep)
        with self.path.open("a+b", buffering=0) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size:
                # a process that died while writing leaves half a line: never glue ours to it
                stream.seek(size - 1)
                if stream.read(1) != b"\n":
                    data = b"\n" + data
            written = stream.write(data)
            if written != len(data):  # the disk filled up within the line
                if rotate:
                    stream.truncate(size)
                raise OSError(f"only {written} of {len(data)} bytes could be written")
        self._pending.clear()

    def _rotate(self, room_bytes: int, keep: int) -> None:
        # A file that cannot be renamed (open in an editor on Windows) just grows until it can. The newest is moved out
        # of the way first, so that a failure there never pushes older ones off the end, try after try.
        with contextlib.suppress(OSError):
            size = self.path.stat().st_size
            if size == 0 or size <= room_bytes:
                return
            aside = _numbered(self.path, 0)
            if not aside.exists():  # else it is left from a rotation that was cut short
                self.path.replace(aside)
            for number in reversed(_numbers(self.path)):
                if number >= keep:
                    _numbered(self.path, number).unlink()
                else:
                    _numbered(self.path, number).replace(_numbered(self.path, number + 1))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _numbers(path: Path) -> list[int]:
    """Numbers of the older files of `path`, newest first."""
    suffixes = (found.name[len(path.name) + 1 :] for found in path.parent.glob(f"{path.name}.*"))
    return sorted(int(suffix) for suffix in suffixes if suffix.isdecimal() and suffix.isascii())


class Journal:
    """Writes events to `folder`, or with None to the log of the process only. Thread safe; nothing here raises.

    level: least severe events that are kept; warnings and errors always are.
    max_mb: size in MB (1e6 bytes) at which each file starts anew. keep: older files kept of each.

    Every event that is kept is also a record of the logger `kitchen_accel`, at its own level. No handler is installed
    anywhere and no file stays open.
    """

    def __init__(self, folder: Path | None, level: Level = "info", max_mb: float = 5.0, keep: int = 3) -> None:
        self._folder = folder
        self._logger = logging.getLogger("kitchen_accel")
        self._mutex = threading.Lock()
        self._seen: OrderedDict[Hashable, bytes] = OrderedDict()
        self._failing = False
        self._files: tuple[_RollingFile, _RollingFile] | None = None
        self._lock: filelock.BaseFileLock | None = None
        if folder is not None:
            self._files = (_RollingFile(folder / LOG_NAME), _RollingFile(folder / JSONL_NAME))
            # one lock object, always used under the mutex, whichever thread that is
            self._lock = filelock.FileLock(str(folder / _LOCK_NAME), timeout=_LOCK_WAIT_S, thread_local=False)
        self.configure(level, max_mb, keep)

    @classmethod
    def open(cls, candidates: Sequence[Path], level: Level = "info", max_mb: float = 5.0, keep: int = 3) -> Journal:
        """The journal in the first folder that can be written; missing folders are made.

        Without such a folder the journal has none, which one warning tells with every folder's reason.
        """
        refused: list[str] = []
        for folder in candidates:
            try:
                _probe(folder)
            except OSError as error:
                refused.append(f"{folder}: {error.strerror or error}")
                continue
            journal = cls(folder, level, max_mb, keep)
            if refused:
                journal.event("journal", f"the journal is kept in {folder}", refused=refused)
            return journal
        journal = cls(None, level, max_mb, keep)
        if refused:
            message = "no folder for the journal can be written, its events go to this log only"
            journal.event("journal", f"{message} ({'; '.join(refused)})", level="warning")
        return journal

    @property
    def folder(self) -> Path | None:
        """Where the files are, or None."""
        return self._folder

    def configure(self, level: Level, max_mb: float, keep: int) -> None:
        """Take over changed settings; the next event obeys them."""
        self._threshold = min(_LEVELS.get(level, logging.INFO), logging.WARNING)
        self._limit_bytes = max(1, int(max_mb * 1e6))
        self._keep = keep

    def event(self, kind: str, message: str, /, *, level: Level = "info", **fields: object) -> None:
        """Write one event.

        kind: stable word for machines, e.g. `"decision"`, `"build"`, `"fallback"`. message: for people; may have
        lines. fields: for the JSON file, anything; `kitchen.log` shows of them exceptions (type and message, the
        traceback is in the JSON file only) and the lines of `detail`.
        """
        if self._kept(level):
            self._write(kind, message, level, _jsonable(fields))

    def once(self, key: Hashable, kind: str, message: str, /, *, level: Level = "info", **fields: object) -> bool:
        """Write the event only if message or fields differ from the last ones of this `key` and `kind`.

        Returns whether they differ (the event itself may still be below the level). Tracebacks do not count.
        """
        plain = _jsonable(fields)
        state = hashlib.blake2b(_dumps([message, _without_tracebacks(plain)]), digest_size=16).digest()
        with self._mutex:
            slot = (kind, key)
            changed = self._seen.get(slot) != state
            self._seen[slot] = state
            self._seen.move_to_end(slot)
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        if changed and self._kept(level):
            self._write(kind, message, level, plain)
        return changed

    def close(self) -> None:
        """Write what is still pending; later events go to the log of the process only."""
        with self._mutex:
            files, self._files = self._files, None
            if files is not None:
                with contextlib.suppress(OSError), self._locked() as locked:
                    for file in files:
                        file.flush(self._limit_bytes, self._keep, rotate=locked)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, level: str) -> bool:
        return _LEVELS.get(level, logging.INFO) >= self._threshold

    def _write(self, kind: str, message: str, level: str, fields: dict[str, Any]) -> None:
        now = datetime.now(timezone.utc)
        text = _for_people(kind, message, fields)
        # the console is shared with everybody else: one line, and the whole of it only when something went wrong
        shown = text if level != "info" else text.partition("\n")[0]
        self._logger.log(_LEVELS.get(level, logging.INFO), "[kitchen_accel] %s", shown)
        record: dict[str, Any] = {
            "ts": now.isoformat(timespec="milliseconds"),
            "kind": _short(str(kind), _MAX_TEXT),
            "level": level,
            "message": _short(str(message), _MAX_TEXT),
            "pid": os.getpid(),
        }
        record |= {f"{name}_" if name in record else name: value for name, value in fields.items()}
        stamp = now.astimezone().isoformat(sep=" ", timespec="milliseconds")
        human = f"{stamp} {level.upper():7} {text}\n".encode("utf-8", "backslashreplace")
        failure: OSError | None = None
        with self._mutex:
            if self._files is None or self._folder is None:
                return
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                failure = error
            with self._locked() as locked:
                for file, line in zip(self._files, (human, _dumps(record) + b"\n"), strict=True):
                    try:
                        file.append(line, self._limit_bytes, self._keep, rotate=locked)
                    except OSError as error:
                        failure = failure or error
            news = (failure is not None) != self._failing
            self._failing = failure is not None
        if news and failure is not None:
            self._logger.warning(
                "journal: %s cannot be written (%s); its events go to this log, and to the file as soon as it can be "
                "written again",
                self._folder,
                failure.strerror or failure,
            )

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the folder's lock file if that is possible in time; tells whether it is held."""
        lock = self._lock
        held = False
        if lock is not None:
            # Timeout is an OSError; a file system without locks raises NotImplementedError
            with contextlib.suppress(OSError, NotImplementedError):
                lock.acquire(timeout=_LOCK_WAIT_S, poll_interval=0.005)
                held = True
        try:
            yield held
        finally:
            if held and lock is not None:
                with contextlib.suppress(OSError):
                    lock.release()


def read(folder: Path, limit: int) -> list[dict[str, Any]]:
    """The last `limit` events in `folder`, oldest first, older files included.

    Lines that are no JSON object (cut short, damaged) are left out; a missing folder has no events. Never raises.
    """
    newest = folder / JSONL_NAME
    found: list[dict[str, Any]] = []
    for path in (newest, *(_numbered(newest, number) for number in _numbers(newest))):
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError:
            continue  # missing for a moment while another process rotates
        for line in reversed(lines):
            if len(found) >= limit:
                return found[::-1]
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    found.append(record)
    return found[::-1]


def _probe(folder: Path) -> None:
    """Raises OSError unless both files can be appended to."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (LOG_NAME, JSONL_NAME):
        with (folder / name).open("ab"):
            pass


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _dumps(value: object) -> bytes:
    # backslashreplace writes a lone surrogate (an undecodable file name) as the escape JSON has for it
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def _jsonable(fields: Mapping[str, object]) -> dict[str, Any]:
    """The fields as JSON values; one that cannot even be turned to text says so instead of raising."""
    budget = iter(range(_MAX_VALUES))
    return {name: _plain(value, budget, 0) for name, value in fields.items()}


def _plain(value: Any, budget: Iterator[int], depth: int) -> Any:
    """`value` as JSON: numbers, lists, mappings and dataclasses by content, everything else by its text."""
    if next(budget, None) is None:
        return "..."
    try:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str) and not isinstance(value, Enum):
            return _short(str(value), _MAX_TEXT)
        if isinstance(value, Enum):
            return _plain(value.value, budget, depth + 1) if depth < _MAX_DEPTH else str(value)
        if isinstance(value, Integral):
            number = int(value)
            return number if number.bit_length() <= 1024 else hex(number)  # longer ones Python refuses to print
        if isinstance(value, Real):
            measure = float(value)
            return measure if isfinite(measure) else str(measure)  # JSON has no inf and nan
        if isinstance(value, PurePath):
            return _short(str(value), _MAX_TEXT)
        if isinstance(value, BaseException):
            return {
                "type": type(value).__name__,
                "message": _short(str(value), _MAX_TEXT),
                "traceback": _short("".join(traceback.format_exception(value)), _MAX_TEXT),
            }
        if depth < _MAX_DEPTH:
            if is_dataclass(value) and not isinstance(value, type):
                return {
                    f.name: _plain(getattr(value, f.name, None), budget, depth + 1) for f in dataclass_fields(value)
                }
            if isinstance(value, Mapping):
                pairs = list(value.items())
                plain = {_short(str(k), 200): _plain(v, budget, depth + 1) for k, v in pairs[:_MAX_ITEMS]}
                return plain if len(pairs) <= _MAX_ITEMS else plain | {"...": f"{len(pairs)} items"}
            if isinstance(value, (list, tuple, set, frozenset, deque)):
                items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else list(value)
                listed = [_plain(item, budget, depth + 1) for item in items[:_MAX_ITEMS]]
                return listed if len(items) <= _MAX_ITEMS else [*listed, f"... ({len(items)} items)"]
        return _short(str(value), _MAX_TEXT)
    except Exception as error:  # a foreign object's own code: its text is not worth a prompt
        return f"<{type(value).__name__}, whose text failed with {type(error).__name__}>"


def _without_tracebacks(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_tracebacks(item) for name, item in value.items() if name != "traceback"}
    return [_without_tracebacks(item) for item in value] if isinstance(value, list) else value


def _for_people(kind: str, message: str, fields: Mapping[str, Any]) -> str:
    """`kind: message`, then each exception and the lines of `detail`, indented; all other fields are for machines."""
    below: list[str] = []
    for name, value in fields.items():
        if isinstance(value, dict) and value.keys() == {"type", "message", "traceback"}:
            below.append(f"{name}: {value['type']}: {value['message']}")
        elif name == "detail" and value:
            below.extend(map(str, value) if isinstance(value, list) else str(value).splitlines())
    text = "\n".join(_short(line, 4_000) for line in (f"{kind}: {message}", *below))
    return text.replace("\r\n", "\n").translate(_CONTROL).replace("\n", "\n    ")
