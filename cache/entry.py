"""Reading entries of the cache: what is there, and whether it is whole and the one that was asked for.

Nothing here writes, takes a lock or follows a link.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..backends.base import Measurement, ShapeProfile
from ..errors import CacheMiss
from . import files as disk
from .key import FOLDER_DIGITS, EngineKey, differences
from .manifest import BLOBS_FOLDER, BUILD_AGAIN, MANIFEST_FILE, MANIFEST_LIMIT_BYTES, FileRecord, Manifest

_ENTRY: Final = re.compile(rf"[0-9a-f]{{{FOLDER_DIGITS}}}", re.ASCII)
_DIFFERENCES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class StoredEngine:
    """A verified entry. folder: where its files lie; the manifest lists them."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The key's full digest."""
        return self.manifest.digest

    @property
    def key(self) -> EngineKey:
        """The key it was built for."""
        return self.manifest.key

    @property
    def profile(self) -> ShapeProfile:
        """The shapes the engine really accepts."""
        return self.manifest.profile

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """What the build process measured."""
        return self.manifest.measurements

    @property
    def label(self) -> str:
        """The model's name for people."""
        return self.manifest.label

    @property
    def blobs(self) -> Path:
        """Where the runtime may keep compiled kernels. May not exist yet."""
        return self.folder / BLOBS_FOLDER


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One folder of the cache as listed, not verified.

    digest: the 20 digits. size_bytes: on disk, blobs included. last_used: seconds since the epoch.
    manifest: None when it cannot be read; `problem` then says why.
    """

    digest: str
    folder: Path
    size_bytes: int
    last_used: float
    manifest: Manifest | None
    problem: str = ""


def entry_folders(root: Path) -> list[Path]:
    """Everything in `root` with an entry's name, sorted. Empty when `root` cannot be read."""
    try:
        return sorted(path for path in root.iterdir() if _ENTRY.fullmatch(path.name))
    except OSError:
        return []


def read_entry(folder: Path) -> CacheEntry:
    """The entry in `folder` as it is, damaged or not."""
    manifest, problem, last_used = None, "", 0.0
    try:
        manifest = read_manifest(folder)
    except CacheMiss as miss:
        problem = str(miss)
    for path in (folder / MANIFEST_FILE, folder):
        seen = disk.plain_stat(path)
        if seen is not None:
            last_used = seen.st_mtime
            break
    return CacheEntry(folder.name, folder, disk.size_on_disk(folder), last_used, manifest, problem)


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`. Raises CacheMiss, field `entry`, `manifest` or `format_version`."""
    if not disk.is_plain_folder(folder):
        raise CacheMiss(f"{folder.name} in the cache is no folder", field="entry", next_step=BUILD_AGAIN)
    try:
        data = disk.read_capped(folder / MANIFEST_FILE, MANIFEST_LIMIT_BYTES)
    except (OSError, ValueError) as error:
        raise CacheMiss(
            f"the manifest of {folder.name} cannot be read", field="manifest", got=str(error), next_step=BUILD_AGAIN
        ) from error
    return Manifest.from_bytes(data)


class Verifier:
    """Opens entries below `root` and remembers the sha256 of every file it has read, by path, size and times."""

    def __init__(self, root: Path) -> None:
        self._root = root
        # (path, bytes, mtime, ctime) in ns: a file swapped for another of the same size and mtime has a new ctime
        self._hashed: dict[tuple[str, int, int, int], str] = {}

    def open(self, key: EngineKey) -> StoredEngine:
        """The entry of `key`, verified. Raises CacheMiss as `EngineStore.find` says."""
        folder = self._root / key.folder_name
        if not os.path.lexists(folder):
            raise self._absent(key)
        manifest = read_manifest(folder)
        unlike = differences(manifest.key, key)
        if unlike:
            field, found, asked = unlike[0]
            raise CacheMiss(
                f"the entry {folder.name} is another engine's: {field} differs",
                field=f"key.{field}",
                got=found,
                allowed=str(asked),
                next_step=BUILD_AGAIN,
            )
        if manifest.digest != key.digest:
            raise CacheMiss(
                f"the entry {folder.name} has another digest than its key",
                field="digest",
                got=manifest.digest,
                allowed=key.digest,
                next_step=BUILD_AGAIN,
            )
        for name, record in manifest.files.items():
            self._verify(folder, name, record)
        blobs = folder / BLOBS_FOLDER
        if os.path.lexists(blobs) and not is_plain_tree(blobs):
            raise _file_miss(folder, BLOBS_FOLDER, "is no folder of regular files", None, "a folder of regular files")
        return StoredEngine(folder, manifest)

    def remember(self, path: Path, sha256: str) -> None:
        """Note what this process hashed under another name. Raises OSError."""
        self._hashed[_identity(path, path.stat())] = sha256

    def _verify(self, folder: Path, name: str, record: FileRecord) -> None:
        path = folder
        for part in name.split("/")[:-1]:
            path = path / part
            if not disk.is_plain_folder(path):
                raise _file_miss(folder, name, f"is below {part}, which is no folder", None, "a folder")
        path = folder / name
        if not disk.is_plain_file(path):
            raise _file_miss(folder, name, "is missing or no regular file", None, "a regular file")
        try:
            seen = path.stat()
            if seen.st_size != record.bytes:
                raise _file_miss(folder, name, "has another size", f"{seen.st_size} bytes", f"{record.bytes} bytes")
            identity = _identity(path, seen)
            if identity not in self._hashed:
                self._hashed[identity] = disk.hash_file(path)[1]
        except OSError as error:
            raise _file_miss(folder, name, "cannot be read", str(error), "a readable file") from error
        if self._hashed[identity] != record.sha256:
            raise _file_miss(folder, name, "has another sha256", self._hashed[identity], record.sha256)

    def _absent(self, key: EngineKey) -> CacheMiss:
        candidates = []
        for folder in entry_folders(self._root):
            try:
                found = read_manifest(folder).key
            except CacheMiss:
                continue
            if found.backend == key.backend and found.model.class_name == key.model.class_name:
                candidates.append(differences(found, key))
        what = f"there is no {key.backend} engine of {key.model.class_name} for this key"
        if candidates:
            nearest = min(candidates, key=len)
            shown = nearest[:_DIFFERENCES_SHOWN]
            listed = ", ".join(f"{field} (there {found!r}, asked {asked!r})" for field, found, asked in shown)
            more = f" and {len(nearest) - len(shown)} more" if len(nearest) > len(shown) else ""
            what += f"; the nearest one differs in {listed}{more}"
        return CacheMiss(what, field="entry", next_step=BUILD_AGAIN)


def is_plain_tree(folder: Path) -> bool:
    """Whether `folder` is a folder that holds nothing but regular files and such folders."""
    return disk.is_plain_folder(folder) and all(disk.is_plain_file(path) for path in disk.walk(folder))


def _identity(path: Path, seen: os.stat_result) -> tuple[str, int, int, int]:
    return str(path), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns


def _file_miss(folder: Path, name: str, fault: str, got: str | None, allowed: str) -> CacheMiss:
    return CacheMiss(
        f"{name} of the entry {folder.name} {fault}",
        field=f"files.{name}",
        got=got,
        allowed=allowed,
        next_step=BUILD_AGAIN,
    )
