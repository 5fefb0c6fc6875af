"""The engine store in one process: what is put is found, what does not fit or belong is refused with a next step."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from kitchen_accel.backends.base import BuildOptions, DimRange, InputProfile, Measurement, ShapeProfile, StepTimes
from kitchen_accel.cache import files
from kitchen_accel.cache.key import EngineKey, ModelIdentity
from kitchen_accel.cache.manifest import NAME_LIMIT, ProvenState, name_fault
from kitchen_accel.cache.store import EngineStore, StoredEngine
from kitchen_accel.errors import CacheError, CacheMiss

PROFILE = ShapeProfile((InputProfile("x", "float32", (DimRange("batch", 1, 8), 4, DimRange("height", 8, 128, 8), 64)),))
KEY = EngineKey(
    backend="openvino",
    model=ModelIdentity("UNetModel", "c0", "d0", "e0", "f0", "float16", "float32"),
    profile=PROFILE,
    options=BuildOptions("CPU", (("precision", "auto"),)),
    versions=(("kitchen_accel", "0.1.0"), ("openvino", "2026.4.1"), ("torch", "2.14.1")),
    platform="linux",
    hardware="a CPU",
)
MEASURED = Measurement("bf16", "static", 41.5, 1.11, 2.2)
XML, BIN = b"<net/>" * 50, bytes(range(256)) * 64
GIB = 1 << 30
GIVEN: dict[str, Any] = {
    "build_seconds": 12.5,
    "label": "a.safetensors",
    "profile": PROFILE,
    "measurements": (MEASURED,),
    "notes": (("capture", "dynamic"),),
}


def key(number: int) -> EngineKey:
    return replace(KEY, model=replace(KEY.model, weights_digest=f"e{number}"))


def put(store: EngineStore, wanted: EngineKey = KEY, xml: bytes = XML, **changed: Any) -> StoredEngine:
    staged = store.stage()
    (staged / "engine.xml").write_bytes(xml)
    (staged / "parts").mkdir()
    (staged / "parts" / "engine.bin").write_bytes(BIN)
    return store.put(wanted, staged, **{**GIVEN, **changed})


def miss(store: EngineStore, wanted: EngineKey = KEY) -> CacheMiss:
    with pytest.raises(CacheMiss) as caught:
        store.find(wanted)
    return caught.value


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.fixture
def store(root: Path) -> EngineStore:
    return EngineStore(root, GIB, lock_timeout_s=5)


def staging(root: Path) -> list[Path]:
    return sorted((root / ".staging").iterdir())


def test_nothing_is_touched_before_first_use(store: EngineStore, root: Path) -> None:
    assert miss(store).field == "entry"
    assert (store.entries(), store.total_bytes(), store.evict(), store.sweep()) == ((), 0, (), 0)
    assert store.remove(KEY.digest) is False
    assert store.state(KEY.digest) == ProvenState()
    assert store.free_bytes() > 0
    assert not root.exists()


def test_what_was_put_is_found_by_the_next_start(store: EngineStore, root: Path) -> None:
    stored = put(store)
    for reader in (store, EngineStore(root, GIB)):
        found = reader.find(KEY)
        assert found == stored
        assert (found.key, found.digest, found.profile, found.measurements) == (KEY, KEY.digest, PROFILE, (MEASURED,))
        assert found.folder == root / KEY.folder_name
        assert (found.folder / "parts" / "engine.bin").read_bytes() == BIN
    assert staging(root) == []
    assert sorted(path.name for path in stored.folder.iterdir()) == ["engine.xml", "manifest.json", "parts"]


def test_the_folder_describes_itself(store: EngineStore, root: Path) -> None:
    stored = put(store)
    assert "Comfy Kitchen Accelerator" in (root / "README.txt").read_text("utf-8")
    manifest = json.loads((stored.folder / "manifest.json").read_text("utf-8"))
    assert manifest["digest"] == KEY.digest
    assert manifest["key"] == KEY.to_json()
    assert manifest["build_seconds"] == 12.5
    assert manifest["label"] == "a.safetensors"
    assert manifest["files"]["parts/engine.bin"]["bytes"] == len(BIN)
    assert manifest["reproduce"]["versions"]["openvino"] == "2026.4.1"
    assert "backend openvino on CPU" in manifest["reproduce"]["text"]


def test_a_miss_names_how_the_nearest_entry_differs(store: EngineStore) -> None:
    put(store)
    put(store, replace(key(5), platform="windows", hardware="b"))
    newer = (("kitchen_accel", "0.1.0"), ("openvino", "2027.0"), ("torch", "2.14.1"))
    found = miss(store, replace(KEY, versions=newer))
    assert found.field == "entry"
    assert "the nearest one differs in versions.openvino (there '2026.4.1', asked '2027.0');" in str(found)
    other_class = replace(KEY, model=replace(KEY.model, class_name="MMDiT"))
    assert "nearest" not in str(miss(store, other_class))
    assert "nearest" not in str(miss(store, replace(KEY, backend="tensorrt")))


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no time of change that cannot be set")
def test_a_flipped_byte_with_the_old_time_is_seen_in_the_same_process(store: EngineStore) -> None:
    payload = put(store).folder / "engine.xml"
    store.find(KEY)
    before = payload.stat()
    payload.write_bytes(b"(" + XML[1:])
    os.utime(payload, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert miss(store).field == "files.engine.xml"


def test_a_file_is_hashed_once_a_process(store: EngineStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store)
    hashed: list[str] = []
    real = files.hash_file

    def noted(path: Path) -> tuple[int, str]:
        hashed.append(path.name)
        return real(path)

    monkeypatch.setattr(files, "hash_file", noted)
    store.find(KEY)
    assert hashed == []  # put has just read them
    fresh = EngineStore(root, GIB)
    for _ in range(3):
        fresh.find(KEY)
    assert sorted(hashed) == ["engine.bin", "engine.xml"]


def test_a_valid_entry_is_kept(store: EngineStore, root: Path) -> None:
    first = put(store)
    store.add_proof(KEY.digest, "bf16", 44.0)
    second = put(store, xml=b"another build", label="b")
    assert second == first
    assert (first.folder / "engine.xml").read_bytes() == XML
    assert store.state(KEY.digest).proofs["bf16"].psnr_db == 44.0
    assert staging(root) == []


def test_a_damaged_entry_takes_its_proofs_along(store: EngineStore) -> None:
    folder = put(store).folder
    store.add_proof(KEY.digest, "bf16", 44.0)
    (folder / "engine.xml").write_bytes(b"x")
    put(store, xml=b"another build")
    assert (folder / "engine.xml").read_bytes() == b"another build"
    assert store.state(KEY.digest) == ProvenState()


def test_blobs_are_neither_listed_nor_hashed(store: EngineStore, root: Path) -> None:
    staged = store.stage()
    (staged / "engine.xml").write_bytes(XML)
    (staged / "blobs").mkdir()
    (staged / "blobs" / "1234567890123456.blob").write_bytes(b"kernel")
    stored = store.put(KEY, staged, **GIVEN)
    assert list(stored.manifest.files) == ["engine.xml"]
    before = store.total_bytes()
    (stored.blobs / "another.blob").write_bytes(b"k" * 1000)
    assert store.total_bytes() == before + 1000
    assert EngineStore(root, GIB).find(KEY).blobs == stored.folder / "blobs"


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "State.json",
        "a b",
        ".hidden",
        "-dash",
        "con.bin",
        "x" * (NAME_LIMIT + 1),
        "Engine.XML",
        "ü",
        "dot.",
    ],
)
def test_files_no_entry_may_hold_are_refused(store: EngineStore, root: Path, name: str) -> None:
    staged = store.stage()
    (staged / "engine.xml").write_bytes(XML)
    (staged / name).write_bytes(b"")
    with pytest.raises(CacheError, match=r"the build left files that no entry may hold; got"):
        store.put(KEY, staged, **GIVEN)
    assert staging(root) == []
    assert store.entries() == ()


@pytest.mark.skipif(os.name == "nt", reason="needs links and pipes")
@pytest.mark.parametrize("kind", ["link", "pipe", "blob link", "nothing"])
def test_what_is_no_regular_file_is_refused(store: EngineStore, root: Path, kind: str, tmp_path: Path) -> None:
    staged = store.stage()
    (tmp_path / "secret").write_bytes(b"secret")
    if kind == "link":
        (staged / "engine.xml").symlink_to(tmp_path / "secret")
    elif kind == "pipe":
        os.mkfifo(staged / "engine.xml")
    elif kind == "blob link":
        (staged / "engine.xml").write_bytes(b"")
        (staged / "blobs").mkdir()
        (staged / "blobs" / "a").symlink_to(tmp_path / "secret")
    with pytest.raises(CacheError, match=r"the build left files that no entry may hold; got"):
        store.put(KEY, staged, **GIVEN)
    assert staging(root) == []
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_only_a_staging_folder_is_stored_or_discarded(store: EngineStore, root: Path, tmp_path: Path) -> None:
    folder = put(store).folder
    (tmp_path / "mine").mkdir()
    for place in (folder, tmp_path / "mine", root, root / ".staging", root / ".staging" / ".." / "x"):
        store.discard(place)
        with pytest.raises(CacheError, match="only a staging folder"):
            store.put(key(2), place, **GIVEN)
    assert (tmp_path / "mine").exists()
    store.find(KEY)
    staged = store.stage()
    store.discard(staged)
    assert not staged.exists()


@pytest.mark.parametrize("digest", ["../../etc", "", "e" * 19, "E" * 20, "e" * 65, f"{'e' * 20}/..", f"{'e' * 20}\n"])
def test_a_digest_is_no_path(store: EngineStore, digest: str) -> None:
    put(store)
    for ask in (store.remove, store.state, lambda d: store.add_proof(d, "bf16", 1.0)):
        with pytest.raises(CacheError, match=r"an engine's digest; got"):
            ask(digest)


def test_labels_and_notes_of_any_text_stay_readable(store: EngineStore, root: Path) -> None:
    put(store, label="\udcff" + "ü" * 500, notes=(("log", "\ud800 \0 " + "x" * 100_000),))
    found = EngineStore(root, GIB).find(KEY).manifest
    assert found.label == "?" + "ü" * 199
    assert len(found.notes[0][1]) == 4000


def test_measurements_that_json_cannot_hold(store: EngineStore, root: Path) -> None:
    odd = (replace(MEASURED, psnr_db=float("inf")), replace(MEASURED, psnr_db=float("nan")))
    put(store, measurements=odd)
    assert [m.psnr_db for m in EngineStore(root, GIB).find(KEY).measurements] == [999.0, -999.0]
    with pytest.raises(CacheError, match="would not be readable"):
        put(store, key(2), measurements=(replace(MEASURED, step_s=float("nan")),))
    with pytest.raises(CacheError, match="would not be readable"):
        put(store, key(2), notes=tuple((f"{i}", "x" * 4000) for i in range(300)))
    assert len(store.entries()) == 1
    assert staging(root) == []


def aged(store: EngineStore, *numbers: int) -> None:
    """Entries used `number` hours ago, in this order."""
    for number in numbers:
        stored = put(store, key(number))
        when = time.time() - 3600 * number
        os.utime(stored.folder / "manifest.json", (when, when))


def left(store: EngineStore) -> set[int]:
    return {int(e.manifest.key.model.weights_digest[1:]) for e in store.entries() if e.manifest}


def test_evict_takes_what_was_used_longest_ago(store: EngineStore, root: Path) -> None:
    aged(store, 3, 1, 4, 2)
    one = store.entries()[0].size_bytes
    assert store.total_bytes() == sum(p.lstat().st_size for e in store.entries() for p in e.folder.rglob("*.*"))
    store.find(key(4))  # a hit is a use
    small = EngineStore(root, int(2.5 * one))
    gone = small.evict(in_use=(key(3).digest,))
    assert gone == (key(2).folder_name, key(1).folder_name)
    assert left(store) == {3, 4}
    assert small.evict() == ()
    assert small.evict(needed_bytes=one) == (key(3).folder_name,)
    assert EngineStore(root, 0).evict(in_use=(key(4).folder_name,)) == ()
    assert left(store) == {4}
    assert EngineStore(root, 0).evict() == (key(4).folder_name,)
    assert (store.total_bytes(), staging(root)) == (0, [])


def test_an_entry_the_system_holds_is_not_evicted(
    store: EngineStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows does it with a file that is open."""
    aged(store, 2, 1)
    held = root / key(2).folder_name
    real = Path.rename

    def rename(self: Path, target: Any) -> Path:
        if self == held:
            raise PermissionError(errno.EACCES, "in use", str(self))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert EngineStore(root, 0).evict() == (key(1).folder_name,)
    with pytest.raises(CacheError, match=r"in use.*next step: close every other ComfyUI"):
        store.remove(key(2).digest)
    (held / "engine.xml").write_bytes(b"damaged")
    with pytest.raises(CacheError, match=r"in use.*next step: close every other ComfyUI"):
        put(store, key(2))
    assert (held / "engine.xml").read_bytes() == b"damaged"
    assert staging(root) == []


def test_remove(store: EngineStore) -> None:
    put(store)
    assert store.remove(KEY.folder_name) is True
    assert store.remove(KEY.digest) is False
    assert miss(store).field == "entry"


def test_foreign_things_in_the_folder_are_left_alone(store: EngineStore, root: Path) -> None:
    put(store)
    for place in (root / "my notes", root / ".staging" / "my folder", root / ("A" * 20)):
        place.mkdir()
        os.utime(place, (1, 1))
    EngineStore(root, 0).evict()
    assert store.sweep() == 0
    assert {"my notes", "A" * 20} <= {path.name for path in root.iterdir()}
    assert [path.name for path in staging(root)] == ["my folder"]


def test_a_state_grows_and_is_kept(store: EngineStore, root: Path) -> None:
    put(store)
    digest = KEY.digest
    store.add_proof(digest, "bf16", 44.5)
    store.add_proof(digest, "fp32", float("inf"))
    store.record_times(digest, "x 2x4x64x64", StepTimes("openvino", "bf16", 1.1, 5))
    store.record_times(digest, "x 2x4x64x64", StepTimes("cuda", None, 2.2, 4))
    other = EngineStore(root, GIB)
    assert {name: proof.psnr_db for name, proof in other.state(digest).proofs.items()} == {"bf16": 44.5, "fp32": 999.0}
    assert other.state(digest).step_times("x 2x4x64x64") == (
        StepTimes("openvino", "bf16", 1.1, 5),
        StepTimes("cuda", None, 2.2, 4),
    )
    other.quarantine(digest, "bf16", "PSNR 12 dB")
    state = store.state(digest)
    assert set(state.proofs) == {"fp32"}
    assert getattr(state.quarantined("bf16"), "reason", None) == "PSNR 12 dB"
    assert state.quarantined("fp32") is None
    whole = store.quarantine(digest, "*", "crashed")
    assert whole.proofs == {}
    assert whole.quarantined("fp32") is not None
    assert store.lift_quarantine(digest).quarantined("bf16") is None
    assert staging(root) == []
    store.find(KEY)


def test_a_state_is_bounded(store: EngineStore) -> None:
    state = ProvenState()
    for index in range(205):
        state = state.with_times(f"x {index}", StepTimes("cuda", None, 1.0, 3))
    state = state.with_times("x 5", StepTimes("openvino", "fp32", 1.0, 3))
    state = state.with_quarantine("*", "\udcff" * 5000)
    assert len(state.times) == 200
    assert "x 4" not in state.times
    assert list(state.times)[-1] == "x 5"
    assert len(state.step_times("x 5")) == 2
    assert ProvenState.from_bytes(state.to_bytes()) == state
    with pytest.raises(CacheError, match="a shape signature"):
        state.with_times("x" * 1001, StepTimes("cuda", None, 1.0, 3))
    with pytest.raises(CacheError, match="time of cuda"):
        state.with_times("x", StepTimes("cuda", None, float("nan"), 3))
    with pytest.raises(CacheError, match="proof of bf16"):
        state.with_proof("bf16", float("nan"))


PROOF = b'{"format_version": 1, "proofs": {"%b": {"psnr_db": 1.0, "at": "2026-01-01T00:00:00+00:00"}}}'


def test_the_damage_below_is_only_the_name_of_the_precision() -> None:
    assert set(ProvenState.from_bytes(PROOF % b"bf16").proofs) == {"bf16"}


@pytest.mark.parametrize("damage", [b"", b"{", PROOF % b"fp64", PROOF % b"*", b'{"extra": 1}', b"[" * 100_000])
def test_a_damaged_state_proves_nothing_and_heals(store: EngineStore, damage: bytes) -> None:
    folder = put(store).folder
    store.add_proof(KEY.digest, "bf16", 44.0)
    (folder / "state.json").write_bytes(damage)
    assert store.state(KEY.digest) == ProvenState()
    store.find(KEY)
    store.add_proof(KEY.digest, "fp16", 50.0)
    assert set(store.state(KEY.digest).proofs) == {"fp16"}


def test_no_state_without_an_entry(store: EngineStore, root: Path) -> None:
    with pytest.raises(CacheError, match="there is no entry"):
        store.add_proof(KEY.digest, "bf16", 44.0)
    assert not root.exists()


def test_threads_update_one_state_without_loss(store: EngineStore) -> None:
    put(store)

    def work(number: int) -> None:
        for index in range(4):
            store.record_times(KEY.digest, f"{number}-{index}", StepTimes("cuda", None, 1.0, 3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.state(KEY.digest).times) == 20


def test_a_held_lock_is_an_error_that_says_what_to_do(root: Path) -> None:
    store = EngineStore(root, GIB, lock_timeout_s=0.2)
    put(store)
    with FileLock(root / ".lock"), pytest.raises(CacheError) as caught:
        put(store, key(2))
    assert str(root / ".lock") in str(caught.value)
    assert "no lock after 0.2 seconds" in str(caught.value)
    assert "next step: wait for the other ComfyUI" in str(caught.value)
    store.find(KEY)  # reading needs no lock
    assert staging(root) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)])
@pytest.mark.parametrize("step", ["stage", "payload", "manifest", "state"])
def test_a_full_disk_leaves_nothing_and_says_how_much(
    store: EngineStore, root: Path, monkeypatch: pytest.MonkeyPatch, code: int, step: str
) -> None:
    put(store)
    staged = store.stage()
    (staged / "engine.xml").write_bytes(XML)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "hash_file" if step == "payload" else "write_all", full)
    monkeypatch.setattr("kitchen_accel.cache.staging.write_all", full)
    steps: dict[str, Callable[[], Any]] = {
        "stage": store.stage,
        "state": lambda: store.add_proof(KEY.digest, "bf16", 44.0),
    }
    act = steps.get(step, lambda: store.put(key(2), staged, **GIVEN))
    with pytest.raises(CacheError) as caught:
        act()
    assert "is full" in str(caught.value)
    assert " bytes free" in str(caught.value)
    assert "at least" in str(caught.value)
    assert "next step: free some space" in str(caught.value)
    monkeypatch.undo()
    store.discard(staged)
    assert staging(root) == []
    assert [entry.digest for entry in store.entries()] == [KEY.folder_name]
    store.find(KEY)
    assert store.state(KEY.digest) == ProvenState()


def test_a_build_that_cannot_fit_is_refused_at_once(store: EngineStore, root: Path) -> None:
    with pytest.raises(CacheError, match=rf"at least {1 << 60} bytes free; next step"):
        store.stage(needed_bytes=1 << 60)
    assert staging(root) == []


def test_a_file_in_place_of_the_folder_is_a_clear_error(root: Path) -> None:
    root.write_bytes(b"")
    store = EngineStore(root, GIB)
    assert miss(store).field == "entry"
    assert store.entries() == ()
    with pytest.raises(CacheError, match="no engine can be built into the cache"):
        store.stage()


def test_every_path_tail_stays_under_80_characters(store: EngineStore, root: Path) -> None:
    """Windows' limit is 260 for the whole path; what we add to the user's folder stays short, whatever the names."""
    for name in ("a" * NAME_LIMIT, f"{'b' * 23}/{'c' * 24}", "d/" * 23 + "dd"):
        assert name_fault(name) == ""
        assert name_fault(name + "x") != ""
        staged = store.stage()
        place = staged / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(b"x")
        tails = [path.relative_to(root).as_posix() for path in root.rglob("*")]
        # a pid has up to ten digits
        assert max(len(tail) + 10 - len(str(os.getpid())) * tail.startswith(".staging/") for tail in tails) < 80
        wanted = key(len(name) + ord(name[0]))
        store.put(wanted, staged, **{**GIVEN, "label": "x" * 999})
        store.add_proof(wanted.digest, "bf16", 44.0)
    assert max(len(path.relative_to(root).as_posix()) for path in root.rglob("*")) < 80
