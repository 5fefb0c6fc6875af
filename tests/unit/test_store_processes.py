"""The engine store among real processes and on real disks: races, kill -9, a full disk, a read-only one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from kitchen_accel.backends.base import BuildOptions, InputProfile, ShapeProfile
from kitchen_accel.cache.key import EngineKey, ModelIdentity
from kitchen_accel.cache.store import EngineStore, StoredEngine
from kitchen_accel.errors import CacheMiss

TESTS = Path(__file__).resolve().parents[1]
PROFILE = ShapeProfile((InputProfile("x", "float32", (2, 4, 64, 64)),))
KEY = EngineKey(
    backend="openvino",
    model=ModelIdentity("UNetModel", "c0", "d0", "e0", "f0", "float16", "float32"),
    profile=PROFILE,
    options=BuildOptions("CPU"),
    versions=(("torch", "2.14.1"),),
    platform="linux",
    hardware="a CPU",
)
GIB = 1 << 30
# what every child starts with: the package as the tests load it, the key, and a way to put an engine
PRELUDE = f"""
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {str(TESTS)!r})
import conftest
from kitchen_accel.cache import files, staging
from kitchen_accel.cache import store as module
from kitchen_accel.cache.key import EngineKey
from kitchen_accel.cache.store import EngineStore
from kitchen_accel.errors import CacheError, CacheMiss
KEY = EngineKey.from_json(json.loads({json.dumps(KEY.to_json())!r}))
root = Path(sys.argv[1])
store = EngineStore(root, 1 << 30)
def fill(payload):
    staged = store.stage()
    (staged / "engine.bin").write_bytes(payload)
    return staged
def put(staged, key=KEY):
    return store.put(key, staged, build_seconds=1, label="", profile=key.profile, measurements=(), notes=())
def stop():
    print("here", flush=True)
    time.sleep(600)
"""


def child(root: Path, script: str, *, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.Popen([*before, sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return text


def killed_where(root: Path, script: str) -> int:
    """Run the script until it says that it is there, then kill -9 it; its pid."""
    with child(root, script) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.kill()
    assert said == "here\n"
    return process.pid


def put(store: EngineStore, payload: bytes = b"engine") -> StoredEngine:
    staged = store.stage()
    (staged / "engine.bin").write_bytes(payload)
    return store.put(KEY, staged, build_seconds=1, label="", profile=PROFILE, measurements=(), notes=())


def miss(store: EngineStore) -> str:
    with pytest.raises(CacheMiss) as caught:
        store.find(KEY)
    return caught.value.field


def staging(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".staging").iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.mark.parametrize("there", ["nothing", "a damaged entry"])
def test_processes_that_put_one_key_at_once_agree(root: Path, tmp_path: Path, there: str) -> None:
    store = EngineStore(root, GIB)
    if there != "nothing":
        (put(store).folder / "engine.bin").write_bytes(b"ENGINE")
    go = tmp_path / "go"
    script = f"""
    staged = fill(str(os.getpid()).encode() * 1000)
    (root / f"ready-{{os.getpid()}}").touch()
    while not Path({str(go)!r}).exists():
        time.sleep(0.001)
    folder = put(staged).folder
    print((folder / "engine.bin").read_bytes()[:20].decode())
    """
    children = [child(root, script) for _ in range(4)]
    try:
        while len(list(root.glob("ready-*"))) < 4 and all(process.poll() is None for process in children):
            time.sleep(0.01)
        go.touch()
        said = {output(process) for process in children}
    finally:
        for process in children:
            process.kill()
            process.wait()
    assert len(said) == 1  # one of them won, and all of them got its engine
    found = EngineStore(root, GIB).find(KEY)
    assert (found.folder / "engine.bin").read_bytes()[:20].decode() == said.pop().strip()
    assert staging(root) == []
    assert len(store.entries()) == 1


KILL = {
    "while building": "fill(b'engine'); stop()",
    "while hashing": "files.hash_file = lambda *a, **k: stop(); put(fill(b'engine'))",
    "in the middle of the manifest": """
        staged = fill(b"engine")
        def half(handle, data):
            handle.write(data[: len(data) // 2]); handle.flush(); stop()
        files.write_all = half
        put(staged)
    """,
    "under the lock, before the rename": "files.move = lambda *a, **k: stop(); put(fill(b'engine'))",
}


@pytest.mark.parametrize("script", KILL.values(), ids=KILL.keys())
def test_a_put_that_is_killed_leaves_nothing_to_find(root: Path, script: str) -> None:
    killed_where(root, script)
    store = EngineStore(root, GIB, lock_timeout_s=5)
    assert miss(store) == "entry"
    assert len(staging(root)) == 1
    assert store.sweep() == 1
    assert staging(root) == []
    assert (put(store).folder / "engine.bin").read_bytes() == b"engine"


def test_a_replacement_that_is_killed_leaves_nothing_to_find(root: Path) -> None:
    store = EngineStore(root, GIB, lock_timeout_s=5)
    folder = put(store).folder
    (folder / "engine.bin").write_bytes(b"ENGINE")
    killed_where(
        root,
        """
        real = files.move
        staged = fill(b"new")
        files.move = lambda source, target, **k: stop() if source == staged else real(source, target, **k)
        put(staged)
        """,
    )
    assert not folder.exists()
    assert miss(store) == "entry"
    assert len(staging(root)) == 2  # the damaged one, out of sight, and the new one
    assert store.sweep() == 2
    assert put(store).folder == folder


def test_a_removal_that_is_killed_leaves_nothing_to_find(root: Path) -> None:
    store = EngineStore(root, GIB, lock_timeout_s=5)
    put(store)
    killed_where(root, "files.delete = lambda *a: stop(); store.remove(KEY.digest)")
    assert miss(store) == "entry"
    assert store.total_bytes() == 0
    assert store.sweep() == 1
    assert staging(root) == []


def test_a_state_whose_writer_is_killed_is_the_old_one(root: Path) -> None:
    store = EngineStore(root, GIB, lock_timeout_s=5)
    put(store)
    store.add_proof(KEY.digest, "bf16", 44.0)
    before = store.state(KEY.digest)
    killed_where(root, "files.move = lambda *a, **k: stop(); store.add_proof(KEY.digest, 'fp32', 80.0)")
    assert store.state(KEY.digest) == before
    assert store.sweep() == 1
    assert staging(root) == []
    assert set(store.add_proof(KEY.digest, "fp32", 80.0).proofs) == {"bf16", "fp32"}


def test_processes_update_one_state_without_loss(root: Path) -> None:
    store = EngineStore(root, GIB)
    put(store)
    script = """
    from kitchen_accel.backends.base import StepTimes
    for index in range(5):
        store.record_times(KEY.digest, f"{os.getpid()} {index}", StepTimes("cuda", None, 1.0, 3))
    """
    for process in [child(root, script) for _ in range(3)]:
        output(process)
    assert len(store.state(KEY.digest).times) == 15


def test_finding_while_others_replace_and_evict_is_a_hit_or_a_miss(root: Path) -> None:
    store = EngineStore(root, GIB)
    put(store)
    script = """
    for index in range(12):
        EngineStore(root, 0).evict()
        put(fill(b"engine"))
    """
    process = child(root, script)
    fields = set()
    while process.poll() is None:
        try:
            found = store.find(KEY)
            assert found.manifest.files["engine.bin"].bytes == 6
        except CacheMiss as caught:
            fields.add(caught.field)
    output(process)
    assert fields <= {"entry", "manifest", "files.engine.bin"}
    assert miss_or_hit(store) == "hit"


def miss_or_hit(store: EngineStore) -> str:
    try:
        store.find(KEY)
    except CacheMiss as caught:
        return caught.field
    return "hit"


def owner(folder: Path, **changed: Any) -> None:
    file = folder / "owner.json"
    file.write_text(json.dumps({**json.loads(file.read_text("ascii")), **changed}), "ascii")


def test_sweep_knows_who_is_alive(root: Path) -> None:
    store = EngineStore(root, GIB)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    kept = {name: store.stage() for name in ("mine", "another machine's", "nameless but alive")}
    swept = {name: store.stage() for name in ("dead", "pid used again", "a day old", "nonsense", "nameless and dead")}
    owner(kept["another machine's"], machine="0" * 16, pid=gone.pid)
    (kept["nameless but alive"] / "owner.json").unlink()
    owner(swept["dead"], pid=gone.pid)
    owner(swept["pid used again"], started=psutil.Process().create_time() - 100)
    long_ago = time.time() - 24 * 3600 - 60
    os.utime(swept["a day old"], (long_ago, long_ago))
    for name in ("nonsense", "nameless and dead"):
        renamed = swept[name].with_name(f"{gone.pid}-{swept[name].name[-8:]}")
        swept[name] = swept[name].rename(renamed)
        (renamed / "owner.json").unlink()
    (swept["nonsense"] / "owner.json").write_bytes(b"[" * 3000)
    assert store.sweep() == len(swept)
    assert staging(root) == sorted(folder.name for folder in kept.values())
    store.find(put(store).key)


def test_a_build_in_another_process_is_not_swept(root: Path) -> None:
    killed_where(root, "fill(b'engine'); stop()")
    # a live one: its stdin stays open until the sweep is over
    code = PRELUDE + "staged = fill(b'engine'); print('here', flush=True); sys.stdin.read(); put(staged)"
    live = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert live.stdout is not None
    assert live.stdout.readline() == "here\n"
    store = EngineStore(root, GIB)
    assert store.sweep() == 1
    assert [name.split("-")[0] for name in staging(root)] == [str(live.pid)]
    live.communicate(timeout=60)
    assert miss_or_hit(store) == "hit"


def on_a_disk_of_its_own(tmp_path: Path, size: str, script: str) -> str:
    """Run `script` with `root` on a fresh tmpfs of `size` that only this child sees; `remount` makes it read-only."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("needs Linux and unshare to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    private = ("unshare", "--mount", "--map-root-user")
    mount = f'mount -t tmpfs -o size={size} none "{disk}"'
    allowed = subprocess.run([*private, "sh", "-c", mount], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"this user may not mount a small disk: {allowed.stderr.strip()}")
    shell = (*private, "sh", "-c", mount + ' && exec "$@"', "sh")
    remount = f"""
def remount():
    import subprocess
    subprocess.run(["mount", "-o", "remount,ro", {str(disk)!r}], check=True)
"""
    return output(child(disk / "engines", remount + textwrap.dedent(script), before=shell))


def test_a_real_full_disk_leaves_nothing_partial(tmp_path: Path) -> None:
    said = on_a_disk_of_its_own(
        tmp_path,
        "1m",
        """
        from dataclasses import replace
        put(fill(b"e" * 100_000))
        staged = fill(b"engine")
        ballast = root.parent / "ballast"
        def to_the_last_byte():
            try:
                with ballast.open("ab", buffering=0) as handle:
                    while handle.write(b"x" * 512):
                        pass
            except OSError as error:
                assert error.errno == 28, error
        other = replace(KEY, hardware="another CPU")
        for act in (
            store.stage, lambda: put(staged, other), lambda: store.add_proof(KEY.digest, "bf16", 44.0)
        ):
            to_the_last_byte()
            try:
                act()
            except CacheError as error:
                assert "is full; got '0 bytes free" in str(error), error
                assert "next step: free some space" in str(error), error
                print("full")
        assert list((root / ".staging").iterdir()) == []
        assert [entry.digest for entry in store.entries()] == [KEY.folder_name]
        assert not (root / KEY.folder_name / "state.json").exists()
        EngineStore(root, 1).find(KEY)
        from kitchen_accel.cache.digests import DigestMemo
        to_the_last_byte()
        DigestMemo(root.parent / "memo.json").put(ballast, "unet", "d")
        assert DigestMemo(root.parent / "memo.json").get(ballast, "unet") is None
        assert not (root.parent / "memo.json").exists() and not (root.parent / "memo.json.tmp").exists()
        to_the_last_byte()
        try:
            EngineStore(root.parent / "second", 1 << 30).stage()
        except CacheError as error:
            assert "is full" in str(error), error
            print("full")
        assert [p for p in (root.parent / "second").rglob("*") if p.is_file()] == []
        assert EngineStore(root, 1).evict() == (KEY.folder_name,)
        put(fill(b"fits"), other)
        print("healed")
        """,
    )
    assert said.split() == ["full", "full", "full", "full", "healed"]


def test_a_real_read_only_disk_can_be_read(tmp_path: Path) -> None:
    said = on_a_disk_of_its_own(
        tmp_path,
        "4m",
        """
        from dataclasses import replace
        folder = put(fill(b"engine")).folder
        store.add_proof(KEY.digest, "bf16", 44.0)
        staged = fill(b"engine")
        from kitchen_accel.cache.digests import DigestMemo
        memo = DigestMemo(root.parent / "memo.json")
        memo.put(folder / "engine.bin", "unet", "d1")
        remount()
        other = replace(KEY, hardware="another CPU")
        for reader in (store, EngineStore(root, 1)):
            assert reader.find(KEY).folder == folder
            assert reader.state(KEY.digest).proofs["bf16"].psnr_db == 44.0
            assert reader.total_bytes() > 0 and len(reader.entries()) == 1 and reader.sweep() == 0
            try:
                reader.find(other)
            except CacheMiss as miss:
                assert miss.field == "entry" and "hardware" in str(miss)
        for act in (
            store.stage, lambda: put(staged, other), lambda: store.remove(KEY.digest), EngineStore(root, 0).evict,
            lambda: store.add_proof(KEY.digest, "fp32", 80.0), EngineStore(root.parent / "new", 1).stage,
        ):
            try:
                act()
            except CacheError as error:
                assert "next step: give this user the right to write there, or set runtime_cache" in str(error), error
                print("refused")
        memo.put(folder / "engine.bin", "vae", "d2")
        assert memo.get(folder / "engine.bin", "vae") == "d2"
        assert DigestMemo(root.parent / "memo.json").get(folder / "engine.bin", "unet") == "d1"
        assert DigestMemo(root.parent / "none.json").get(folder / "engine.bin", "unet") is None
        """,
    )
    assert said.split() == ["refused"] * 6
