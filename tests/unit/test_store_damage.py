"""Every kind of damage to an entry of the engine store is a miss that names its field, and the next build heals it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kitchen_accel.backends.base import BuildOptions, DimRange, InputProfile, Measurement, ShapeProfile
from kitchen_accel.cache.key import EngineKey, ModelIdentity
from kitchen_accel.cache.manifest import MANIFEST_LIMIT_BYTES
from kitchen_accel.cache.store import EngineStore
from kitchen_accel.errors import CacheMiss

PROFILE = ShapeProfile((InputProfile("x", "float32", (DimRange("batch", 1, 8), 4, DimRange("height", 8, 128, 8), 64)),))
KEY = EngineKey(
    backend="openvino",
    model=ModelIdentity("UNetModel", "c0", "d0", "e0", "f0", "float16", "float32"),
    profile=PROFILE,
    options=BuildOptions("CPU"),
    versions=(("kitchen_accel", "0.1.0"), ("openvino", "2026.4.1"), ("torch", "2.14.1")),
    platform="linux",
    hardware="a CPU",
)
MEASURED = Measurement("bf16", "static", 41.5, 1.11, 2.2)
XML, BIN = b"<net/>" * 50, bytes(range(256)) * 64
GIB = 1 << 30


def put(store: EngineStore) -> Path:
    staged = store.stage()
    (staged / "engine.xml").write_bytes(XML)
    (staged / "parts").mkdir()
    (staged / "parts" / "engine.bin").write_bytes(BIN)
    return store.put(
        KEY, staged, build_seconds=1, label="a", profile=PROFILE, measurements=(MEASURED,), notes=(("a", "b"),)
    ).folder


def miss(store: EngineStore) -> CacheMiss:
    with pytest.raises(CacheMiss) as caught:
        store.find(KEY)
    return caught.value


def outside_content(root: Path) -> dict[str, int]:
    """Name and number of files of everything beside the cache."""
    return {
        path.name: 1 if path.is_file() else len(list(path.rglob("*"))) for path in root.parent.glob("*") if path != root
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "engines").mkdir()
    (tmp_path / "a file of the user").write_bytes(b"x")
    return tmp_path / "engines"


@pytest.fixture
def store(root: Path) -> EngineStore:
    return EngineStore(root, GIB, lock_timeout_s=5)


def edit(manifest: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(manifest.read_text("utf-8"))
    change(data)
    manifest.write_text(json.dumps(data), "utf-8")


def swap(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


def outside(folder: Path, name: str) -> None:
    """Replace a file of the entry by a link to an equal file elsewhere: the bytes are right, the place is not."""
    place = folder / name
    away = next(path for path in (folder, *folder.parents) if path.name == "engines").parent / "away"
    place.rename(away)
    place.symlink_to(away, target_is_directory=away.is_dir())


def rename_file(new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit(folder / "manifest.json", lambda data: data["files"].update({new: data["files"].pop("engine.xml")}))

    return change


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "manifest.json", change)


def becomes_file(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()
    folder.write_bytes(b"no folder")


def becomes_folder(folder: Path) -> None:
    (folder / "engine.xml").unlink()
    (folder / "engine.xml").mkdir()


def blobs_outside(folder: Path) -> None:
    swap(folder / "blobs" / "kernel", b"k")
    outside(folder, "blobs")


def blob_outside(folder: Path) -> None:
    swap(folder / "blobs" / "kernel", b"k")
    outside(folder / "blobs", "kernel")


def widen(folder: Path) -> None:
    edit(folder / "manifest.json", lambda data: data["key"]["profile"]["inputs"][0]["dims"][0].update(max=9))


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "payload gone": ("files.engine.xml", lambda f: (f / "engine.xml").unlink()),
    "payload cut": ("files.engine.xml", lambda f: swap(f / "engine.xml", XML[:-1])),
    "payload longer": ("files.engine.xml", lambda f: swap(f / "engine.xml", XML + b"x")),
    "first byte": ("files.engine.xml", lambda f: swap(f / "engine.xml", b"(" + XML[1:])),
    "one bit in the last byte": ("files.parts/engine.bin", lambda f: swap(f / "parts/engine.bin", BIN[:-1] + b"\xfe")),
    "payload is a folder": ("files.engine.xml", becomes_folder),
    "payload is a link": ("files.engine.xml", lambda f: outside(f, "engine.xml")),
    "folder of payload is a link": ("files.parts/engine.bin", lambda f: outside(f, "parts")),
    "blobs is a link": ("files.blobs", blobs_outside),
    "blob is a link": ("files.blobs", blob_outside),
    "blobs is a file": ("files.blobs", lambda f: (f / "blobs").write_bytes(b"")),
    "entry is a link": ("entry", lambda f: outside(f.parent, f.name)),
    "entry is a file": ("entry", becomes_file),
    "manifest gone": ("manifest", lambda f: (f / "manifest.json").unlink()),
    "manifest is a link": ("manifest", lambda f: outside(f, "manifest.json")),
    "manifest is empty": ("manifest", lambda f: swap(f / "manifest.json", b"")),
    "manifest is a list": ("manifest", lambda f: swap(f / "manifest.json", b"[]")),
    "manifest is no text": ("manifest", lambda f: swap(f / "manifest.json", b"\xff\xfe\x00")),
    "manifest nests deeply": ("manifest", lambda f: swap(f / "manifest.json", b"[" * 500_000)),
    "manifest too large": ("manifest", lambda f: swap(f / "manifest.json", b" " * (MANIFEST_LIMIT_BYTES + 1))),
    "newer format": ("format_version", edited(lambda d: d.update(format_version=2, unheard_of=1))),
    "older format": ("format_version", edited(lambda d: d.update(format_version=0))),
    "format is true": ("manifest", edited(lambda d: d.update(format_version=True))),
    "extra field": ("manifest", edited(lambda d: d.update(extra=1))),
    "extra field in the key": ("manifest", edited(lambda d: d["key"].update(extra=1))),
    "extra field deep down": ("manifest", edited(lambda d: d["profile"]["inputs"][0].update(extra=1))),
    "extra field in a measurement": ("manifest", edited(lambda d: d["measurements"][0].update(extra=1))),
    "field gone": ("manifest", edited(lambda d: d.pop("label"))),
    "text for a number": ("manifest", edited(lambda d: d.update(build_seconds="12.5"))),
    "no number": ("manifest", edited(lambda d: d["measurements"][0].update(psnr_db=float("nan")))),
    "infinite": ("manifest", edited(lambda d: d["measurements"][0].update(step_s=float("inf")))),
    "no time": ("manifest", edited(lambda d: d.update(created="yesterday"))),
    "time without zone": ("manifest", edited(lambda d: d.update(created="2026-01-01T00:00:00"))),
    "negative size": ("manifest", edited(lambda d: d["files"]["engine.xml"].update(bytes=-1))),
    "no files": ("manifest", edited(lambda d: d.update(files={}))),
    "another model's": ("key.model.weights_digest", edited(lambda d: d["key"]["model"].update(weights_digest="e9"))),
    "another version's": ("key.versions.torch", edited(lambda d: d["key"]["versions"][2].__setitem__(1, "2.15"))),
    "another range": ("key.profile.inputs.x.dims.0.max", widen),
    "another digest": ("digest", edited(lambda d: d.update(digest="0" * 64))),
    "another sha256": ("files.engine.xml", edited(lambda d: d["files"]["engine.xml"].update(sha256="0" * 64))),
    "file with dots": ("manifest", rename_file("../engine.xml")),
    "file with inner dots": ("manifest", rename_file("parts/../engine.xml")),
    "absolute file": ("manifest", rename_file("/etc/passwd")),
    "file on a drive": ("manifest", rename_file("C:engine.xml")),
    "file with a backslash": ("manifest", rename_file("..\\engine.xml")),
    "file on a share": ("manifest", rename_file("//host/share/engine.xml")),
    "device": ("manifest", rename_file("NUL.xml")),
}  # fmt: skip


@pytest.mark.parametrize(("field", "damage"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_a_miss_and_is_healed_by_the_next_build(
    store: EngineStore, root: Path, field: str, damage: Callable[[Path], Any]
) -> None:
    folder = put(store)
    before = outside_content(root)
    try:
        damage(folder)
    except OSError as error:
        if os.name != "nt":
            raise
        pytest.skip(f"this Windows user may not make links: {error}")
    for reader in (store, EngineStore(root, GIB)):  # the process that hashed the files, and the next one
        found = miss(reader)
        assert found.field == field, found
        assert "next step: " in str(found), found
    assert len(store.entries()) == 1
    assert store.total_bytes() >= 0
    assert put(store) == folder
    assert EngineStore(root, GIB).find(KEY).folder == folder
    assert list((root / ".staging").iterdir()) == []
    # whatever a link pointed to is still there, whole
    assert all(content for content in outside_content(root).values())
    assert before.items() <= outside_content(root).items()


def test_a_manifest_cut_anywhere_is_a_miss(store: EngineStore) -> None:
    manifest = put(store) / "manifest.json"
    whole = manifest.read_bytes()
    for length in range(0, len(whole) - 2, 13):
        manifest.write_bytes(whole[:length])
        assert miss(store).field == "manifest"
    manifest.write_bytes(whole)
    store.find(KEY)
