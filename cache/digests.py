"""A memo of model digests, so that a checkpoint of many gigabytes is read once and not at every start.

It is only ever a shortcut: a lost, damaged or unwritable memo costs time, never a wrong answer and never an error.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import CacheError
from .files import locked, read_capped, strict_json, write_atomic

ENTRIES_LIMIT: Final = 500
"""Digests kept; the one used longest ago goes first."""

_LOG: Final = logging.getLogger("kitchen_accel.cache")
_FILE_LIMIT_BYTES: Final = 8_000_000
_LOCK_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells one content of a file from the next: absolute path, size in bytes, times in nanoseconds.

    changed_ns: on Linux and macOS the time of the last change of any kind, which cannot be set back as mtime can
    (archives and copy tools do); on Windows the time of creation.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    changed_ns: int


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    path: str
    size_bytes: int
    mtime_ns: int
    changed_ns: int
    what: str
    digest: str


class _Memo(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format_version: Literal[1] = 1
    records: Annotated[tuple[_Record, ...], Field(max_length=ENTRIES_LIMIT)] = ()


_Known = dict[tuple[FileStamp, str], str]


class DigestMemo:
    """Digests by file and `what`, kept in the JSON file `path`. Safe to use from several threads and processes.

    what: which part of the file was digested and how, in ASCII, e.g. `"unet float16"`.
    Nothing is read before the first call. No method raises: whatever cannot be read or written is as if it was not.
    """

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        self._guard = threading.Lock()
        self._known: _Known = {}
        self._seen: tuple[int, int, int] | None = None

    def stamp(self, file: Path) -> FileStamp | None:
        """How `file` is now, to be taken *before* it is read and given to `put`; None when it cannot be asked."""
        try:
            path = os.path.normcase(os.path.abspath(file))  # noqa: PTH100 - resolve() would follow the user's links
            path.encode("utf-8")
            found = Path(file).stat()
        except (OSError, ValueError):
            return None
        return FileStamp(path, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def get(self, file: Path, what: str) -> str | None:
        """The digest of `file` as it is now, or None when it is not known."""
        stamp = self.stamp(file)
        if stamp is None:
            return None
        with self._guard:
            self._refresh()
            digest = self._known.pop((stamp, what), None)
            if digest is not None:
                self._known[stamp, what] = digest  # last in the dict = used last
            return digest

    def put(self, file: Path, what: str, digest: str, *, before: FileStamp | None = None) -> None:
        """Note the digest of `file`.

        before: the stamp taken before the file was read; nothing is noted when the file has changed since.
        """
        stamp = self.stamp(file)
        if stamp is None or (before is not None and before != stamp) or not (what + digest).isascii():
            return
        with self._guard:
            self._note(stamp, what, digest)
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with locked(Path(f"{self._path}.lock"), _LOCK_TIMEOUT_S):
                    self._refresh()
                    self._note(stamp, what, digest)
                    data = self._to_bytes()
                    write_atomic(self._path, data, Path(f"{self._path}.tmp"))
                    self._seen = self._file_now()
            except (OSError, ValueError, CacheError) as error:
                _LOG.debug("digests stay in memory only: %s", error)

    def _note(self, stamp: FileStamp, what: str, digest: str) -> None:
        # digests of the same file as it was before can never be asked for again
        for old in [key for key in self._known if key[0].path == stamp.path and key[0] != stamp]:
            del self._known[old]
        self._known.pop((stamp, what), None)
        self._known[stamp, what] = digest
        for oldest in list(self._known)[:-ENTRIES_LIMIT]:
            del self._known[oldest]

    def _refresh(self) -> None:
        """Add what other processes wrote since the last look."""
        now = self._file_now()
        if now is None or now == self._seen:
            return
        self._seen = now
        merged: _Known = dict(self._read())
        for key, digest in self._known.items():
            merged.pop(key, None)
            merged[key] = digest
        self._known = dict(list(merged.items())[-ENTRIES_LIMIT:])

    def _read(self) -> Mapping[tuple[FileStamp, str], str]:
        try:
            data = read_capped(self._path, _FILE_LIMIT_BYTES)
            strict_json(data)
            memo = _Memo.model_validate_json(data, strict=True)
        except (OSError, ValueError) as error:
            _LOG.debug("the digest memo is read as empty: %s", error)
            return {}
        return {
            (FileStamp(record.path, record.size_bytes, record.mtime_ns, record.changed_ns), record.what): record.digest
            for record in memo.records
        }

    def _file_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except (OSError, ValueError):
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _to_bytes(self) -> bytes:
        records = [
            {
                "path": stamp.path,
                "size_bytes": stamp.size_bytes,
                "mtime_ns": stamp.mtime_ns,
                "changed_ns": stamp.changed_ns,
                "what": what,
                "digest": digest,
            }
            for (stamp, what), digest in self._known.items()
        ]
        return (json.dumps({"format_version": 1, "records": records}, indent=1) + "\n").encode("ascii")
