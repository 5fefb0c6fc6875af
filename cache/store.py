"""The engine cache on disk: whole entries or none, verified before use, shared safely by several processes.

```
<root>/README.txt                    what this folder is
<root>/.lock                         held while entries appear, change or vanish
<root>/.staging/                     unfinished work (see staging.py)
<root>/<20 hex digits>/manifest.json what was built; its modification time is the last use
<root>/<20 hex digits>/state.json    what was learnt since: proofs, quarantine, times
<root>/<20 hex digits>/<payload>     the engine's files, listed in the manifest with size and sha256
<root>/<20 hex digits>/blobs/        the runtime's own kernel cache, neither listed nor hashed
```
Reading takes no lock and works on a folder that cannot be written.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from ..backends.base import Measurement, Precision, ShapeProfile, StepTimes
from ..errors import CacheError, CacheMiss
from . import files as disk
from . import staging
from .entry import CacheEntry, StoredEngine, Verifier, entry_folders, is_plain_tree, read_entry
from .key import FOLDER_DIGITS, EngineKey
from .manifest import (
    BLOBS_FOLDER,
    BUILD_AGAIN,
    MANIFEST_FILE,
    MANIFEST_FORMAT,
    MANIFEST_LIMIT_BYTES,
    OWNER_FILE,
    STATE_FILE,
    FileRecord,
    Manifest,
    ProvenState,
    clean_label,
    clean_notes,
    names_fault,
    now,
    reproduce,
    storable,
)

__all__ = ["CacheEntry", "EngineStore", "ProvenState", "StoredEngine"]

_LOG: Final = logging.getLogger("kitchen_accel.cache")
_DIGEST: Final = re.compile(rf"[0-9a-f]{{{FOLDER_DIGITS},64}}", re.ASCII)
_README: Final = """\
Engines of Comfy Kitchen Accelerator (a ComfyUI custom node pack).

Each folder named by 20 hex digits is one engine: a diffusion model's network, converted for one backend, device and
range of shapes. manifest.json in it says of which model, with which settings and library versions, when, how long it
took, and how to get it again; state.json what was learnt of it since.

Everything here can be deleted at any time while ComfyUI is closed: what is needed is built again.
The size limit and the place of this folder are set in comfy_kitchen.yaml.
"""


class EngineStore:
    """The engine cache below `root`, at most `max_bytes` large after `evict`. Safe to use from several threads.

    Nothing is read, made or checked before the first call. lock_timeout_s: seconds to wait for another process.
    """

    def __init__(self, root: Path, max_bytes: int, *, lock_timeout_s: float = 30.0) -> None:
        self.root = Path(os.path.abspath(root))  # noqa: PTH100 - resolve() would follow the user's links
        self.max_bytes = max_bytes
        self._lock_timeout_s = lock_timeout_s
        self._verifier = Verifier(self.root)

    def find(self, key: EngineKey) -> StoredEngine:
        """The entry of `key`, every file's size checked, and its sha256 too when this store first sees the file.

        Raises CacheMiss with `field`: `entry` (none, or no folder; the message names how the nearest one differs),
        `manifest` (unreadable or not by its schema), `format_version`, `digest`, `key.<field>` (the manifest is
        another key's), or `files.<name>` (missing, no regular file, another size or sha256).
        """
        found = self._verifier.open(key)
        with suppress(OSError):  # a folder that cannot be written keeps its times
            os.utime(found.folder / MANIFEST_FILE)
        return found

    def stage(self, needed_bytes: int = 0) -> Path:
        """A new folder on the cache's disk to build into; hand it to `put` or `discard`.

        It holds nothing but an `owner.json`, which is to be left alone.
        needed_bytes: what the build will write; a disk with less is refused at once.
        Raises CacheError when the folder cannot be written or the disk is full.
        """
        what = "no engine can be built into the cache"
        with disk.disk_errors(what, self.root, needed_bytes):
            self._make_root()
            if needed_bytes > self.free_bytes():
                raise disk.disk_full(what, self.root, needed_bytes)
            return staging.make(self.root)

    def discard(self, staged: Path) -> None:
        """Delete a staging folder, and nothing else. Never raises OSError."""
        if staging.is_staging(self.root, staged):
            disk.delete(staged)

    def put(
        self,
        key: EngineKey,
        staged: Path,
        *,
        build_seconds: float,
        label: str,
        profile: ShapeProfile,
        measurements: tuple[Measurement, ...],
        notes: tuple[tuple[str, str], ...],
    ) -> StoredEngine:
        """Make `staged` the entry of `key`: hashed, synced to the disk, then renamed in one step.

        A valid entry that is already there is kept and `staged` dropped; a damaged one is replaced, its state with it.
        profile: as built. label: for people. A staging folder is gone afterwards, whatever happens.
        Raises CacheError for a full or read-only disk, a damaged entry in use, or files no entry may hold.
        """
        if not staging.is_staging(self.root, staged):
            raise CacheError("only a staging folder can be stored", got=str(staged), allowed="what stage() returned")
        what = f"the engine {key.folder_name} cannot be stored"
        try:
            found = self._present(key)
            if found is not None:
                return found
            with disk.disk_errors(what, self.root, disk.size_on_disk(staged) + MANIFEST_LIMIT_BYTES):
                manifest = Manifest(
                    format_version=MANIFEST_FORMAT,
                    digest=key.digest,
                    key=key,
                    created=now(),
                    build_seconds=float(build_seconds),
                    label=clean_label(label),
                    profile=profile,
                    measurements=tuple(map(storable, measurements)),
                    notes=clean_notes(notes),
                    files=_records(staged),
                    reproduce=reproduce(key),
                )
                with (staged / MANIFEST_FILE).open("xb") as handle:
                    disk.write_all(handle, manifest.to_bytes())
                disk.sync_folder(staged)
                return self._publish(key, staged, manifest)
        finally:
            self.discard(staged)

    def remove(self, digest: str) -> bool:
        """Delete an entry; False when there is none. digest: full or its first 20 digits. Raises CacheError."""
        folder = self._folder(digest)
        if not os.path.lexists(folder):
            return False
        with self._locked("an entry cannot be removed"):
            if not os.path.lexists(folder):
                return False
            trash = self._trash(folder)
        disk.delete(trash)
        return True

    def evict(self, in_use: Collection[str] = (), *, needed_bytes: int = 0) -> tuple[str, ...]:
        """Delete the entries used longest ago until `max_bytes` holds the rest and `needed_bytes` more.

        in_use: digests (full or 20 digits) that stay, whatever the size. An entry the system will not let go of stays
        too. Returns the 20 digits of what went. Raises CacheError when the folder cannot be written.
        """
        if self.total_bytes() + needed_bytes <= self.max_bytes:
            return ()
        kept = {digest[:FOLDER_DIGITS] for digest in in_use}
        gone: list[tuple[str, Path]] = []
        with self._locked("the cache cannot be made smaller"):
            entries = self.entries()
            total = sum(entry.size_bytes for entry in entries) + needed_bytes
            for entry in sorted(entries, key=lambda entry: entry.last_used):
                if total <= self.max_bytes:
                    break
                if entry.digest in kept:
                    continue
                try:
                    gone.append((entry.digest, self._trash(entry.folder)))
                except CacheError as error:
                    _LOG.info("entry %s stays: %s", entry.digest, error)
                    continue
                total -= entry.size_bytes
        for digest, trash in gone:
            disk.delete(trash)
            _LOG.info("evicted engine %s: the cache may hold %d bytes", digest, self.max_bytes)
        return tuple(digest for digest, _ in gone)

    def sweep(self) -> int:
        """Delete what dead processes left unfinished; returns how many pieces. Raises CacheError when it cannot."""
        if not staging.abandoned(self.root):
            return 0
        with self._locked("unfinished work cannot be cleaned up"):
            # asked again under the lock: a `put` that was about to rename has done so or has not begun
            found = staging.abandoned(self.root)
            for path in found:
                disk.delete(path)
        return sum(not os.path.lexists(path) for path in found)

    def entries(self) -> tuple[CacheEntry, ...]:
        """Every entry by its digits, damaged ones included. Sizes are read from the disk, payloads are not hashed."""
        return tuple(map(read_entry, entry_folders(self.root)))

    def total_bytes(self) -> int:
        """Bytes of all entries on disk. Unfinished work does not count."""
        return sum(map(disk.size_on_disk, entry_folders(self.root)))

    def free_bytes(self) -> int:
        """Bytes free on the cache's disk. Raises CacheError."""
        return disk.free_bytes(self.root)

    def state(self, digest: str) -> ProvenState:
        """What was learnt of an engine. Empty when nothing was, or the file is damaged: then nothing is proven."""
        folder = self._folder(digest)
        if not disk.is_plain_folder(folder):
            return ProvenState()
        try:
            return ProvenState.from_bytes(disk.read_capped(folder / STATE_FILE, MANIFEST_LIMIT_BYTES))
        except (OSError, ValueError):
            return ProvenState()

    def update_state(self, digest: str, change: Callable[[ProvenState], ProvenState]) -> ProvenState:
        """Replace an engine's state by `change(state)` while no other process can; returns it.

        Raises CacheError when there is no such entry or it cannot be written, and whatever `change` raises.
        """
        folder = self._folder(digest)
        if not disk.is_plain_folder(folder):
            raise CacheError(f"there is no entry {folder.name} to note something of", next_step=BUILD_AGAIN)
        with self._locked("the state of an engine cannot be written"):
            if not disk.is_plain_folder(folder):
                raise CacheError(f"the entry {folder.name} was deleted meanwhile", next_step=BUILD_AGAIN)
            new = change(self.state(digest))
            disk.write_atomic(folder / STATE_FILE, new.to_bytes(), staging.fresh(self.root, ".tmp"))
        return new

    def add_proof(self, digest: str, precision: Precision, psnr_db: float) -> ProvenState:
        """Note that the engine agreed with PyTorch. Raises CacheError."""
        return self.update_state(digest, lambda state: state.with_proof(precision, psnr_db))

    def quarantine(self, digest: str, precision: Precision | Literal["*"], reason: str) -> ProvenState:
        """Note that the engine must not run in `precision`, or at all. Raises CacheError."""
        return self.update_state(digest, lambda state: state.with_quarantine(precision, reason))

    def lift_quarantine(self, digest: str) -> ProvenState:
        """Let the engine be proven again. Raises CacheError."""
        return self.update_state(digest, lambda state: state.without_quarantine())

    def record_times(self, digest: str, signature: str, times: StepTimes) -> ProvenState:
        """Note measured step times for these shapes. Raises CacheError."""
        return self.update_state(digest, lambda state: state.with_times(signature, times))

    def _present(self, key: EngineKey) -> StoredEngine | None:
        with suppress(CacheMiss):
            return self._verifier.open(key)
        return None

    def _publish(self, key: EngineKey, staged: Path, manifest: Manifest) -> StoredEngine:
        folder = self.root / key.folder_name
        trash = None
        # another process may have stored the same engine meanwhile: hash it now, so that the lock is held briefly
        self._present(key)
        with self._locked(f"the engine {folder.name} cannot be stored"):
            found = self._present(key)
            if found is not None:
                return found
            if os.path.lexists(folder):
                _LOG.info("the damaged entry %s is replaced", folder.name)
                trash = self._trash(folder)
            (staged / OWNER_FILE).unlink(missing_ok=True)
            with _movable(staged):
                disk.move(staged, folder)
            disk.sync_folder(self.root)
        for name, record in manifest.files.items():
            with suppress(OSError):
                self._verifier.remember(folder / name, record.sha256)
        if trash is not None:
            disk.delete(trash)
        return StoredEngine(folder, manifest)

    def _trash(self, path: Path) -> Path:
        with _movable(path):
            return staging.to_trash(self.root, path)

    def _folder(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise CacheError("an engine's digest", got=digest, allowed=f"{FOLDER_DIGITS} to 64 hex digits (0-9, a-f)")
        return self.root / digest[:FOLDER_DIGITS]

    def _make_root(self) -> None:
        (self.root / staging.STAGING_FOLDER).mkdir(parents=True, exist_ok=True)
        readme = self.root / "README.txt"
        if not os.path.lexists(readme):
            disk.write_atomic(readme, _README.encode("ascii"), staging.fresh(self.root, ".tmp"))

    @contextmanager
    def _locked(self, what: str) -> Iterator[None]:
        with disk.disk_errors(what, self.root, MANIFEST_LIMIT_BYTES):
            self._make_root()
            with disk.locked(self.root / ".lock", self._lock_timeout_s):
                yield


@contextmanager
def _movable(path: Path) -> Iterator[None]:
    # Windows refuses to rename a folder in which any process holds a file open
    try:
        yield
    except PermissionError as error:
        raise CacheError(
            f"{path.name} in the cache is in use or may not be moved",
            got=str(error),
            next_step="close every other ComfyUI that uses this cache folder, then try again",
        ) from error


def _records(staged: Path) -> dict[str, FileRecord]:
    """Hash the payload of `staged` and wait until it is on the disk. Raises CacheError and OSError."""
    blobs = staged / BLOBS_FOLDER
    paths = {
        path.relative_to(staged).as_posix(): path
        for path in disk.walk(staged)
        if blobs not in path.parents and path not in (blobs, staged / OWNER_FILE)
    }
    fault = names_fault(paths)
    if not fault and os.path.lexists(blobs) and not is_plain_tree(blobs):
        fault = f"{BLOBS_FOLDER} is no folder of regular files"
    for name, path in paths.items():
        if not fault and not disk.is_plain_file(path):
            fault = f"{name} is no regular file"
    if fault:
        raise CacheError(
            "the build left files that no entry may hold",
            got=fault,
            allowed="regular files with short plain relative names",
            next_step="report this with the log",
        )
    records = {}
    for name, path in sorted(paths.items()):
        size, sha256 = disk.hash_file(path, sync=True)
        records[name] = FileRecord(bytes=size, sha256=sha256)
    return records
