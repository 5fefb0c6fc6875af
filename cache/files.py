"""Writing, hashing and measuring files so that a crash, a full disk or a foreign link can do no harm.

Nothing here follows a symbolic link below a folder of ours, and nothing becomes visible half written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from filelock import FileLock, Timeout

from ..errors import CacheError

_HASH_CHUNK: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# winerror.h ERROR_HANDLE_DISK_FULL: Python has no errno of its own for it
_WINDOWS_FULL: Final = 39
_JUNCTION: Final = getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1)
# Windows: a virus scanner that looks at a new file makes a rename fail for some tens of milliseconds
_RENAME_TRIES: Final = 10
_RENAME_PAUSE_S: Final = 0.05


def free_bytes(folder: Path) -> int:
    """Bytes free for this user on the disk that holds `folder`, or would hold it. Raises CacheError."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError as error:
        raise CacheError(f"the free space of {place} cannot be read", got=str(error)) from error


@contextmanager
def disk_errors(what: str, folder: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Turn every OSError inside into a CacheError that names `what`, the bytes needed and free, and the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL or getattr(error, "winerror", None) == _WINDOWS_FULL:
            raise disk_full(what, folder, needed_bytes) from error
        if error.errno in _FORBIDDEN:
            raise CacheError(
                f"{what}: {folder} cannot be written",
                got=str(error),
                next_step="give this user the right to write there, or set runtime_cache in comfy_kitchen.yaml to a "
                "folder that can be written",
            ) from error
        raise CacheError(
            f"{what} in {folder}", got=str(error), next_step="check that the disk of this folder works"
        ) from error


def disk_full(what: str, folder: Path, needed_bytes: int) -> CacheError:
    """The error of a full disk or a used-up quota."""
    return CacheError(
        f"{what}: the disk of {folder} is full",
        got=f"{free_bytes(folder)} bytes free (a quota may allow less)",
        allowed=f"at least {needed_bytes} bytes free",
        next_step="free some space there, or set runtime_cache in comfy_kitchen.yaml to a folder on another disk",
    )


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path` against every other process and thread.

    Raises CacheError when it is not free within `timeout_s` seconds, and OSError when it cannot be made.
    The operating system frees it when a process dies, however it dies.
    """
    lock = FileLock(path, timeout=timeout_s)
    try:
        lock.acquire()
    except Timeout as error:
        raise CacheError(
            f"the lock {path} is held by another process",
            got=f"no lock after {timeout_s:g} seconds",
            next_step="wait for the other ComfyUI or build to finish, or end it; the file itself may stay",
        ) from error
    except NotImplementedError as error:
        raise CacheError(
            f"the file system of {path} has no file locks",
            got=str(error),
            next_step="set runtime_cache in comfy_kitchen.yaml to a folder on a local disk",
        ) from error
    try:
        yield
    finally:
        lock.release()


def write_all(handle: BinaryIO, data: bytes) -> None:
    """Write `data` and wait until it is on the disk. Raises OSError."""
    handle.write(data)
    handle.flush()
    os.fsync(handle.fileno())


def write_atomic(path: Path, data: bytes, temporary: Path) -> None:
    """Put `data` at `path`: afterwards the file is either the old one or the new one, whole.

    temporary: a path on the same disk that is free for use. Raises OSError, and leaves nothing behind then.
    """
    try:
        with temporary.open("wb") as handle:
            write_all(handle, data)
        move(temporary, path, over=True)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def move(source: Path, target: Path, *, over: bool = False) -> None:
    """Rename a file or folder on one disk. over: replace a file at `target`. Raises OSError."""
    for left in range(_RENAME_TRIES, 0, -1):
        try:
            if over:
                source.replace(target)
            else:
                source.rename(target)
            return
        except PermissionError:
            if sys.platform != "win32" or left == 1:
                raise
            time.sleep(_RENAME_PAUSE_S)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable where the system can: Windows and some network disks cannot."""
    if sys.platform == "win32":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def hash_file(path: Path, *, sync: bool = False) -> tuple[int, str]:
    """Bytes read and their sha256. sync: also wait until they are on the disk. Raises OSError."""
    total, digest, buffer = 0, hashlib.sha256(), memoryview(bytearray(_HASH_CHUNK))
    # Windows flushes only a handle that may write
    with path.open("r+b" if sync else "rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
            total += count
        if sync:
            os.fsync(handle.fileno())
    return total, digest.hexdigest()


def plain_stat(path: Path) -> os.stat_result | None:
    """The stat of a file or folder that is there and is no link or junction; None for everything else."""
    try:
        found = path.lstat()
    except (OSError, ValueError):
        return None
    if stat.S_ISLNK(found.st_mode) or getattr(found, "st_reparse_tag", 0) == _JUNCTION:
        return None
    return found


def is_plain_folder(path: Path) -> bool:
    """Whether `path` is a folder and no link to one."""
    found = plain_stat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_plain_file(path: Path) -> bool:
    """Whether `path` is a regular file: no link, no pipe, no device."""
    found = plain_stat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def walk(folder: Path) -> Iterator[Path]:
    """Everything below `folder` that is not a plain folder, links included, without following any.

    What vanishes meanwhile or may not be read is left out.
    """
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if is_plain_folder(path):
            yield from walk(path)
        else:
            yield path


def size_on_disk(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    total = 0
    for inside in walk(path) if is_plain_folder(path) else [path]:
        with suppress(OSError):
            total += inside.lstat().st_size
    return total


def delete(path: Path) -> None:
    """Delete a file, a link or a folder as far as the system lets us. Never raises OSError."""
    if is_plain_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_capped(path: Path, limit_bytes: int) -> bytes:
    """The bytes of a regular file of at most `limit_bytes`. Raises OSError, and ValueError for anything else."""
    if not is_plain_file(path):
        if not os.path.lexists(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        raise ValueError("not a regular file")
    with path.open("rb") as handle:
        data = handle.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise ValueError(f"larger than {limit_bytes} bytes")
    return data


def strict_json(data: bytes) -> Any:
    """JSON as RFC 8259 has it: UTF-8, every name once, finite numbers. Raises ValueError for anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        # a number such as 1e999 parses to infinity, which no JSON can hold
        json.dumps(value, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def clean_text(text: str, limit: int) -> str:
    """`text` as JSON readers accept it, at most `limit` characters: lone surrogates (from file names) become `?`."""
    return text[:limit].encode("utf-8", "replace").decode("utf-8")
