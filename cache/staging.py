"""The `.staging` folder of a cache: everything unfinished lives there, and whoever died is cleaned up after.

A staging folder is named `<pid>-<8 hex digits>` and holds an `owner.json`. What waits for deletion is named
`trash-<8 hex digits>`: moving an entry there makes it vanish at once and whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from .files import delete, is_plain_folder, move, read_capped, strict_json, write_all
from .manifest import OWNER_FILE, now

STAGING_FOLDER: Final = ".staging"
STALE_S: Final = 24 * 3600.0
"""Whatever is older is abandoned even when its owner cannot be asked or lives on: no build takes a day."""

_NAME: Final = re.compile(r"([0-9]{1,10})-[0-9a-f]{8}(\.tmp)?", re.ASCII)
_TRASH: Final = re.compile(r"trash-[0-9a-f]{8}", re.ASCII)
_OWNER_LIMIT_BYTES: Final = 4096
# a process's start is given in ticks since boot; the wall clock it is turned into may be adjusted meanwhile
_START_SLACK_S: Final = 2.0


def fresh(root: Path, suffix: str = "") -> Path:
    """A path in the staging folder of `root` that nobody else uses."""
    return root / STAGING_FOLDER / f"{os.getpid()}-{secrets.token_hex(4)}{suffix}"


def make(root: Path) -> Path:
    """A new staging folder of this process, with its `owner.json`. Raises OSError, and leaves nothing behind then."""
    folder = fresh(root)
    folder.mkdir(parents=True)
    owner = {
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "machine": _machine(),
        "created": now(),
    }
    try:
        with (folder / OWNER_FILE).open("wb") as handle:
            write_all(handle, json.dumps(owner).encode("ascii"))
    except BaseException:
        delete(folder)
        raise
    return folder


def is_staging(root: Path, folder: Path) -> bool:
    """Whether `folder` is a staging folder of `root`."""
    return folder.parent == root / STAGING_FOLDER and bool(_NAME.fullmatch(folder.name)) and is_plain_folder(folder)


def to_trash(root: Path, path: Path) -> Path:
    """Move `path` out of sight, whole. The caller deletes what is returned. Raises OSError."""
    trash = root / STAGING_FOLDER / f"trash-{secrets.token_hex(4)}"
    move(path, trash)
    return trash


def abandoned(root: Path) -> tuple[Path, ...]:
    """What nobody will finish: trash, what a dead process left, and what is older than a day.

    Names that are not ours are left alone, and so is what another machine made in the last day.
    """
    try:
        inside = sorted((root / STAGING_FOLDER).iterdir())
    except OSError:
        return ()
    return tuple(path for path in inside if _is_abandoned(path))


def _is_abandoned(path: Path) -> bool:
    if _TRASH.fullmatch(path.name):
        return True
    named = _NAME.fullmatch(path.name)
    if named is None:
        return False
    try:
        if time.time() - path.lstat().st_mtime > STALE_S:
            return True
    except OSError:
        return False
    pid, started = int(named[1]), None
    with suppress(OSError, ValueError, KeyError, TypeError):
        owner = strict_json(read_capped(path / OWNER_FILE, _OWNER_LIMIT_BYTES))
        if owner["machine"] != _machine():
            return False
        pid, started = int(owner["pid"]), float(owner["started"])
    return not _lives(pid, started)


def _lives(pid: int, started: float | None) -> bool:
    """Whether the process `pid` runs and is the one that started at `started` (seconds since the epoch), if known."""
    try:
        begun = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError, OverflowError, ValueError):
        return True  # it cannot be asked: leave its folder to its age
    return started is None or abs(begun - started) < _START_SLACK_S


def _machine() -> str:
    """Tells the machines that share a folder apart without writing their names down."""
    return hashlib.sha256(platform.node().encode("utf-8", "replace")).hexdigest()[:16]
