"""The memo of model digests: right or silent, bounded, shared, and never an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kitchen_accel.cache import digests
from kitchen_accel.cache.digests import ENTRIES_LIMIT, DigestMemo

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights" * 100)
    return file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memo" / "digests.json"


def test_nothing_is_touched_before_the_first_put(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    assert memo.get(model, "unet") is None
    assert not path.parent.exists()


def test_a_digest_is_known_to_the_next_process(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    memo.put(model, "unet float16", "d1")
    memo.put(model, "unet float32", "d2")
    for reader in (memo, DigestMemo(path)):
        assert reader.get(model, "unet float16") == "d1"
        assert reader.get(model, "unet float32") == "d2"
        assert reader.get(model, "vae") is None
    script = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); import conftest\n"
        "from pathlib import Path\n"
        "from kitchen_accel.cache.digests import DigestMemo\n"
        f"print(DigestMemo(Path({str(path)!r})).get(Path({str(model)!r}), 'unet float16'))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "d1"


def test_a_relative_path_is_the_same_file(path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DigestMemo(path).put(model, "unet", "d1")
    monkeypatch.chdir(model.parent)
    assert DigestMemo(path).get(Path(model.name), "unet") == "d1"


def test_a_changed_file_is_not_known(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    memo.put(model, "unet", "d1")
    before = model.stat()
    model.write_bytes(b"WEIGHTS" * 100)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert memo.get(model, "unet") is None
    assert DigestMemo(path).get(model, "unet") is None


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no time of change that cannot be set")
def test_a_swapped_file_with_the_old_size_and_mtime_is_not_known(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    memo.put(model, "unet", "d1")
    before = model.stat()
    other = model.with_name("other")
    other.write_bytes(b"WEIGHTS" * 100)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(model)
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert memo.get(model, "unet") is None


def test_a_file_that_changed_while_it_was_read_is_not_noted(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    before = memo.stamp(model)
    assert before is not None
    memo.put(model, "unet", "d1", before=before)
    assert memo.get(model, "unet") == "d1"
    model.write_bytes(b"longer" * 200)
    memo.put(model, "unet", "d2", before=before)
    assert memo.get(model, "unet") is None


def test_a_missing_file_is_not_known_and_not_noted(path: Path, tmp_path: Path) -> None:
    memo = DigestMemo(path)
    for gone in (tmp_path / "gone", tmp_path / "nul\0name", tmp_path / "bad\udcffname"):
        memo.put(gone, "unet", "d1")
        assert memo.get(gone, "unet") is None
    assert not path.exists()


def test_the_least_recently_used_goes_first(path: Path, tmp_path: Path) -> None:
    memo = DigestMemo(path)
    model = tmp_path / "model"
    model.write_bytes(b"x")
    for index in range(ENTRIES_LIMIT):
        memo._note(memo.stamp(model), f"part {index}", f"d{index}")  # type: ignore[arg-type]
    assert memo.get(model, "part 0") == "d0"
    memo.put(model, "one more", "d")
    kept = json.loads(path.read_text("ascii"))["records"]
    assert len(kept) == ENTRIES_LIMIT
    assert [record["what"] for record in kept[-2:]] == ["part 0", "one more"]
    again = DigestMemo(path)
    assert again.get(model, "part 0") == "d0"
    assert again.get(model, "part 1") is None
    assert again.get(model, "part 2") == "d2"


def test_an_older_content_of_a_file_makes_room(path: Path, model: Path) -> None:
    memo = DigestMemo(path)
    memo.put(model, "unet", "d1")
    model.write_bytes(b"new")
    memo.put(model, "unet", "d2")
    assert [record["digest"] for record in json.loads(path.read_text("ascii"))["records"]] == ["d2"]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"format_version": 2, "records": []}',
        b'{"format_version": 1, "records": [1]}',
        b'{"format_version": 1, "records": [], "extra": 1}',
        b'{"format_version": 1, "format_version": 1, "records": []}',
        b'{"format_version": 1, "records": NaN}',
    ],
)
def test_a_damaged_memo_is_an_empty_one_and_heals(path: Path, model: Path, damage: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(damage)
    memo = DigestMemo(path)
    assert memo.get(model, "unet") is None
    memo.put(model, "unet", "d1")
    assert DigestMemo(path).get(model, "unet") == "d1"


def test_a_truncated_memo_is_an_empty_one(path: Path, model: Path) -> None:
    DigestMemo(path).put(model, "unet", "d1")
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 7):
        path.write_bytes(whole[:length])
        assert DigestMemo(path).get(model, "unet") is None


@pytest.mark.parametrize("kind", ["folder", "file above", "too large"])
def test_a_place_that_cannot_be_written_only_costs_time(
    path: Path, model: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "folder":
        path.mkdir(parents=True)
    elif kind == "file above":
        path.parent.write_bytes(b"")
    else:
        monkeypatch.setattr(digests, "_FILE_LIMIT_BYTES", 10)
    memo = DigestMemo(path)
    memo.put(model, "unet", "d1")
    assert memo.get(model, "unet") == "d1"
    assert DigestMemo(path).get(model, "unet") is None


def test_a_full_disk_keeps_the_old_memo(path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DigestMemo(path).put(model, "unet", "d1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    memo = DigestMemo(path)
    monkeypatch.setattr("kitchen_accel.cache.files.write_all", full)
    memo.put(model, "vae", "d2")
    assert memo.get(model, "vae") == "d2"
    assert sorted(p.name for p in path.parent.iterdir()) == ["digests.json", "digests.json.lock"]
    assert DigestMemo(path).get(model, "unet") == "d1"
    assert DigestMemo(path).get(model, "vae") is None


def test_two_memos_of_one_file_add_up(path: Path, tmp_path: Path) -> None:
    models = [tmp_path / f"m{index}" for index in range(8)]
    for model in models:
        model.write_bytes(b"x")

    def note(model: Path) -> None:
        memo = DigestMemo(path)
        for part in range(5):
            memo.put(model, f"part {part}", f"{model.name}-{part}")

    threads = [threading.Thread(target=note, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memo = DigestMemo(path)
    for model in models:
        for part in range(5):
            assert memo.get(model, f"part {part}") == f"{model.name}-{part}"


def test_another_process_that_noted_more_is_seen(path: Path, model: Path) -> None:
    first, second = DigestMemo(path), DigestMemo(path)
    first.put(model, "a", "d1")
    assert second.get(model, "a") == "d1"
    second.put(model, "b", "d2")
    assert first.get(model, "b") == "d2"
    shutil.rmtree(path.parent)
    assert first.get(model, "b") == "d2"
