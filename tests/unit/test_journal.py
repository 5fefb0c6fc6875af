"""The journal: whole lines whatever happens to the folder, and never an exception."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import filelock
import numpy as np
import pytest
from kitchen_accel import journal as journal_module
from kitchen_accel.errors import ConfigError
from kitchen_accel.journal import JSONL_NAME, LOG_NAME, Journal, read

TESTS = Path(__file__).resolve().parents[1]


def records(folder: Path) -> list[dict[str, Any]]:
    """The newest JSON file, strictly: every line must parse."""
    data = (folder / JSONL_NAME).read_bytes()
    assert data.endswith(b"\n")

    def no_constant(name: str) -> None:
        raise ValueError(name)  # NaN and Infinity are no JSON

    return [json.loads(line, parse_constant=no_constant) for line in data.decode("utf-8").split("\n")[:-1]]


def human(folder: Path) -> str:
    return (folder / LOG_NAME).read_text(encoding="utf-8")


# --- events ------------------------------------------------------------------------------------------------------


def test_event_in_both_files_and_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kitchen_accel")
    with Journal(tmp_path) as journal:
        journal.event("build", "engine built", seconds=1.5, 模型="小", detail=["not x: y", "not z: w"])
    (record,) = records(tmp_path)
    assert record | {"ts": ""} == {
        "ts": "",
        "kind": "build",
        "level": "info",
        "message": "engine built",
        "pid": os.getpid(),
        "seconds": 1.5,
        "模型": "小",
        "detail": ["not x: y", "not z: w"],
    }
    stamp = datetime.datetime.fromisoformat(record["ts"])
    assert stamp.utcoffset() == datetime.timedelta(0)
    assert abs(datetime.datetime.now(datetime.timezone.utc) - stamp) < datetime.timedelta(minutes=5)
    assert human(tmp_path).endswith("INFO    build: engine built\n    not x: y\n    not z: w\n")
    assert caplog.record_tuples == [("kitchen_accel", logging.INFO, "[kitchen_accel] build: engine built")]


@pytest.mark.parametrize("threshold", ["debug", "info", "warning"])
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_levels(tmp_path: Path, caplog: pytest.LogCaptureFixture, threshold: Any, level: Any) -> None:
    caplog.set_level(logging.DEBUG, "kitchen_accel")
    order = ["debug", "info", "warning", "error"]
    kept = order.index(level) >= order.index(threshold)
    journal = Journal(tmp_path, threshold)
    journal.event("k", "m", level=level)
    assert [r["level"] for r in read(tmp_path, 9)] == ([level] if kept else [])
    assert [r.levelname.lower() for r in caplog.records] == ([level] if kept else [])


def test_configure_takes_effect_at_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "warning")
    journal.event("k", "dropped")
    journal.configure("info", 0.0005, 1)
    for n in range(20):
        journal.event("k", f"{n:04} {'x' * 100}")
    assert [r["message"][:4] for r in read(tmp_path, 2)] == ["0018", "0019"]
    assert sorted(p.name for p in tmp_path.glob("kitchen.jsonl*")) == ["kitchen.jsonl", "kitchen.jsonl.1"]


def test_no_handler_and_no_open_file_is_left(tmp_path: Path) -> None:
    before = (list(logging.getLogger().handlers), list(logging.getLogger("kitchen_accel").handlers))
    journal = Journal.open([tmp_path])
    journal.event("k", "m")
    assert (list(logging.getLogger().handlers), list(logging.getLogger("kitchen_accel").handlers)) == before
    # on Windows an open file could not be renamed
    (tmp_path / LOG_NAME).rename(tmp_path / "taken.log")
    journal.event("k", "n")
    assert "k: n" in human(tmp_path)
    if Path("/proc/self/fd").is_dir():
        targets = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        assert targets
        assert not [t for t in targets if str(tmp_path) in t]


def test_closed_journal_only_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    journal.event("k", "first")
    journal.close()
    journal.close()
    journal.event("k", "later", level="warning")
    assert [r["message"] for r in read(tmp_path, 9)] == ["first"]
    assert "k: later" in caplog.text


def test_lines_of_a_message_cannot_look_like_an_event(tmp_path: Path) -> None:
    message = "first\n2026-01-01 00:00:00 WARNING fake: event\r\nthird\x1b[31m\x00\x9b"
    Journal(tmp_path).event("k", message, detail="a\nb")
    lines = human(tmp_path).split("\n")
    assert [line.startswith("    ") for line in lines] == [False, True, True, True, True, False]
    assert lines[-1] == ""
    assert "\\x1b[31m\\x00\\x9b" in lines[2]
    assert records(tmp_path)[0]["message"] == message


def test_own_fields_never_hide_the_journals(tmp_path: Path) -> None:
    Journal(tmp_path).event("k", "m", kind="x", message="y", pid=1, ts=2, key="z")
    (record,) = records(tmp_path)
    assert (record["kind"], record["message"], record["pid"]) == ("k", "m", os.getpid())
    assert (record["kind_"], record["message_"], record["pid_"], record["ts_"], record["key"]) == ("x", "y", 1, 2, "z")


def test_exception_field(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def inner() -> None:
        raise ValueError("the first\nreason")

    journal = Journal(tmp_path)
    try:
        try:
            inner()
        except ValueError as cause:
            raise ConfigError("bad", file="f.yaml", line=3, got=1) from cause
    except ConfigError as error:
        journal.event("fallback", "PyTorch runs instead", level="warning", error=error, many=[error])
    (record,) = records(tmp_path)
    assert record["error"]["type"] == "ConfigError"
    assert record["error"]["message"] == "f.yaml, line 3: bad; got 1."
    for part in ("in inner", "ValueError: the first\nreason", "direct cause", "in test_exception_field"):
        assert part in record["error"]["traceback"]
    assert record["many"] == [record["error"]]
    assert "\n    error: ConfigError: f.yaml, line 3: bad; got 1.\n" in human(tmp_path)
    assert "Traceback" not in human(tmp_path)
    assert "Traceback" not in caplog.text


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    name: str
    shape: tuple[int, ...]
    inner: Fact | None = None


class Colour(enum.Enum):
    RED = "red"


class Hostile:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class HostileMapping(OrderedDict[str, int]):
    def items(self) -> Any:
        raise KeyError("gone")


CYCLE: list[Any] = [1]
CYCLE.extend([CYCLE] * 10)
DEEP: Any = 0
for _ in range(5000):
    DEEP = [DEEP]

VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (3, 3),
    (2.5, 2.5),
    (float("nan"), "nan"),
    (float("inf"), "inf"),
    (float("-inf"), "-inf"),
    (10**20, 10**20),
    (10**5000, hex(10**5000)),
    ("文字 \u2028\t", "文字 \u2028\t"),
    (PureWindowsPath("C:/a/b"), "C:\\a\\b"),
    (PurePosixPath("/a/b"), "/a/b"),
    ((1, (2, "x")), [1, [2, "x"]]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    (deque([1, 2]), [1, 2]),
    ({1: "a", ("x", 2): {"y": None}}, {"1": "a", "('x', 2)": {"y": None}}),
    (b"\xff\x00", "b'\\xff\\x00'"),
    (Fact("a", (1,), Fact("b", ())), {"name": "a", "shape": [1], "inner": {"name": "b", "shape": [], "inner": None}}),
    (Fact, str(Fact)),
    (Colour.RED, "red"),
    (decimal.Decimal("1.50"), "1.50"),
    (fractions.Fraction(1, 2), 0.5),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (np.float32(0.5), 0.5),
    (np.float64("nan"), "nan"),
    (np.int64(7), 7),
    (np.bool_(True), "True"),
    (np.dtype("float16"), "float16"),
    (np.arange(3), "[0 1 2]"),
    (Hostile(), "<Hostile, whose text failed with RuntimeError>"),
    (HostileError(), "<HostileError, whose text failed with RuntimeError>"),
    ([1, Hostile()], [1, "<Hostile, whose text failed with RuntimeError>"]),
    (HostileMapping(a=1), "<HostileMapping, whose text failed with KeyError>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"), VALUES, ids=[f"{n}-{type(v[0]).__name__}" for n, v in enumerate(VALUES)]
)
def test_every_value_becomes_json(tmp_path: Path, value: Any, expected: Any) -> None:
    Journal(tmp_path).event("k", "m", value=value)
    assert records(tmp_path)[0]["value"] == expected
    assert human(tmp_path).count("\n") == 1


def test_torch_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    Journal(tmp_path).event("k", "m", dtype=torch.float16, device=torch.device("cpu"), size=torch.Size([1, 4]))
    (record,) = records(tmp_path)
    assert (record["dtype"], record["device"], record["size"]) == ("torch.float16", "cpu", [1, 4])


@pytest.mark.parametrize(
    "value", [CYCLE, DEEP, "x" * 1_000_000, list(range(1_000_000)), {n: n for n in range(100_000)}, ["y" * 90_000] * 9]
)
def test_runaway_values_are_bounded(tmp_path: Path, value: Any) -> None:
    Journal(tmp_path).event("k", "m", value=value)
    assert records(tmp_path)[0]["message"] == "m"
    assert (tmp_path / JSONL_NAME).stat().st_size < 2_000_000
    assert len(human(tmp_path)) < 1_000


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    name = b"caf\xe9.safetensors".decode("utf-8", "surrogateescape")
    Journal(tmp_path).event("k", f"loaded {name}", name=name)
    assert records(tmp_path)[0]["name"] == name
    assert "caf\\udce9.safetensors" in human(tmp_path)


# --- once --------------------------------------------------------------------------------------------------------


def test_once_writes_changes_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.once("a", "decision", "openvino", step=(1, 2)) is True
    assert journal.once("a", "decision", "openvino", step=[1, 2]) is False
    assert journal.once("b", "decision", "openvino", step=(1, 2)) is True
    assert journal.once("a", "fallback", "openvino", step=(1, 2)) is True, "another kind is another story"
    assert journal.once("a", "decision", "cuda", step=(1, 2)) is True
    assert journal.once("a", "decision", "cuda", step=(1, 3)) is True
    assert journal.once("a", "decision", "openvino", step=(1, 2)) is True, "back again is a change"
    assert journal.once(("x", 1), "decision", "openvino") is True
    assert len(records(tmp_path)) == 7


def test_once_ignores_where_an_error_came_from(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def fail(text: str) -> Exception:
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            return error

    def elsewhere(text: str) -> Exception:
        return fail(text)

    assert journal.once("a", "fallback", "m", error=fail("x")) is True
    assert journal.once("a", "fallback", "m", error=elsewhere("x")) is False
    assert journal.once("a", "fallback", "m", error=RuntimeError("x")) is False
    assert journal.once("a", "fallback", "m", error=fail("y")) is True
    assert "Traceback" in records(tmp_path)[0]["error"]["traceback"]


def test_once_remembers_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "_REMEMBERED", 10)
    journal = Journal(None)
    for n in range(100):
        assert journal.once(n, "k", "m") is True
        assert journal.once(0, "k", "m") is False, "a key in use is not forgotten"
    assert len(journal._seen) == 10
    assert journal.once(99, "k", "m") is False
    assert journal.once(50, "k", "m") is True


def test_once_below_the_level(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "warning")
    assert journal.once("a", "k", "m") is True
    assert journal.once("a", "k", "m") is False
    assert read(tmp_path, 9) == []


# --- rotation and reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_rotation(tmp_path: Path, keep: int) -> None:
    journal = Journal(tmp_path, max_mb=0.002, keep=keep)
    for n in range(200):
        journal.event("k", f"event {n:03}")
    for name in (LOG_NAME, JSONL_NAME):
        found = sorted(p.name for p in tmp_path.glob(f"{name}*"))
        assert found == [name, *(f"{name}.{i}" for i in range(1, keep + 1))]
        assert all(0 < (tmp_path / f).stat().st_size <= 2000 for f in found)
    kept = [r["message"] for r in read(tmp_path, 1000)]
    assert kept == [f"event {n:03}" for n in range(200 - len(kept), 200)]
    assert len(kept) > 10 * keep
    assert read(tmp_path, 5) == read(tmp_path, 1000)[-5:]


def test_fewer_kept_files_remove_the_older_ones(tmp_path: Path) -> None:
    for keep in (4, 2):
        journal = Journal(tmp_path, max_mb=0.001, keep=keep)
        for n in range(60):
            journal.event("k", f"event {n}")
        assert len(list(tmp_path.glob("kitchen.jsonl.*"))) == keep


def test_a_line_larger_than_the_limit_is_written_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_mb=0.0001, keep=5)
    for n in range(3):
        journal.event("k", f"{n}" * 5000)
    assert [r["message"] for r in read(tmp_path, 9)] == [f"{n}" * 5000 for n in range(3)]


def test_rotation_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows while the newest file is open in an editor."""
    journal = Journal(tmp_path, max_mb=0.001, keep=2)
    for n in range(30):
        journal.event("k", f"event {n:03}")
    kept = [r["message"] for r in read(tmp_path, 99)]
    original = Path.replace

    def locked(self: Path, target: Any) -> Path:
        if self.name in (LOG_NAME, JSONL_NAME):
            raise PermissionError(13, "in use")
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", locked)
        for n in range(30, 60):
            journal.event("k", f"event {n:03}")
    expected = [*kept, *(f"event {n:03}" for n in range(30, 60))]
    assert [r["message"] for r in read(tmp_path, 99)] == expected
    journal.event("k", "after")
    assert [r["message"] for r in read(tmp_path, 1)] == ["after"]
    assert len(list(tmp_path.glob("kitchen.jsonl*"))) == 3


def test_rotation_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_mb=0.001, keep=2)
    journal.event("k", "x" * 900)
    (tmp_path / JSONL_NAME).rename(tmp_path / f"{JSONL_NAME}.0")
    journal.event("k", "y" * 900)
    assert [r["message"][0] for r in read(tmp_path, 9)] == ["x", "y"]
    journal.event("k", "z")
    assert [r["message"][0] for r in read(tmp_path, 9)] == ["x", "y", "z"]
    assert not (tmp_path / f"{JSONL_NAME}.0").exists()


def test_read_is_tolerant(tmp_path: Path) -> None:
    assert read(tmp_path, 5) == []
    assert read(tmp_path / "missing", 5) == []
    lines = [b'{"n": 1}', b"\xff\xfe", b"[1]", b"3", b"", b"{}" * 2, b"[" * 100_000, b'{"n": 2}\r', b'{"n": 3, "cut']
    (tmp_path / JSONL_NAME).write_bytes(b"\n".join(lines))
    assert read(tmp_path, 5) == [{"n": 1}, {"n": 2}]
    assert read(tmp_path, 1) == [{"n": 2}]
    assert read(tmp_path, 0) == read(tmp_path, -1) == []
    (tmp_path / f"{JSONL_NAME}.note").write_text('{"n": 9}\n')
    (tmp_path / f"{JSONL_NAME}.2").write_text('{"n": 0}\n')
    assert [r["n"] for r in read(tmp_path, 9)] == [0, 1, 2]
    (tmp_path / "f").write_text("")
    assert read(tmp_path / "f", 5) == []


def test_half_a_line_is_not_glued_to_the_next(tmp_path: Path) -> None:
    for name in (LOG_NAME, JSONL_NAME):
        (tmp_path / name).write_bytes(b'{"killed in the mid')
    Journal(tmp_path).event("k", "m")
    assert [r["message"] for r in read(tmp_path, 9)] == ["m"]
    assert len(human(tmp_path).splitlines()) == 2


# --- when the folder does not work -------------------------------------------------------------------------------


def blocked(tmp_path: Path, name: str = "blocked") -> Path:
    """A folder nobody can write, not even root: its parent is a file."""
    (tmp_path / name).write_text("a file")
    return tmp_path / name / "log"


def test_open_takes_the_first_folder_that_works(tmp_path: Path) -> None:
    journal = Journal.open([blocked(tmp_path, "a"), blocked(tmp_path, "b"), tmp_path / "c" / "d", tmp_path / "e"])
    assert journal.folder == tmp_path / "c" / "d"
    journal.event("k", "m")
    told, event = read(tmp_path / "c" / "d", 9)
    assert [str(tmp_path / name) in reason for name, reason in zip("ab", told["refused"], strict=True)] == [True, True]
    assert event["message"] == "m"
    assert not (tmp_path / "e").exists()


def test_open_says_nothing_when_the_first_works(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert Journal.open([tmp_path]).folder == tmp_path
    assert read(tmp_path, 9) == []
    assert not [r for r in caplog.records if r.name.startswith("kitchen")]


@pytest.mark.parametrize("name", [LOG_NAME, JSONL_NAME])
def test_open_refuses_a_folder_where_one_file_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "a" / name).mkdir(parents=True)
    assert Journal.open([tmp_path / "a", tmp_path / "b"]).folder == tmp_path / "b"


def test_open_without_any_folder_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kitchen_accel")
    a, b = blocked(tmp_path, "a"), blocked(tmp_path, "b")
    journal = Journal.open([a, b])
    assert journal.folder is None
    journal.event("k", "m")
    journal.event("k", "n")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert str(a) in caplog.messages[0]
    assert str(b) in caplog.messages[0]


def test_read_only_folder_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kitchen_accel")
    folder = blocked(tmp_path)
    with Journal(folder) as journal:
        for n in range(5):
            journal.event("k", f"m{n}")
        assert journal.once("a", "k", "m") is True
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert str(folder) in caplog.text
    assert "k: m4" in caplog.text


def test_events_are_kept_until_the_folder_can_be_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = blocked(tmp_path)
    journal = Journal(folder)
    for n in range(journal_module._PENDING + 50):
        journal.event("k", f"{n}")
    folder.parent.unlink()
    journal.event("k", "last")
    messages = [r["message"] for r in records(folder)]
    assert messages == [*(str(n) for n in range(51, journal_module._PENDING + 50)), "last"]
    journal.event("k", "one more")
    assert [r["message"] for r in read(folder, 2)] == ["last", "one more"]


def test_close_writes_what_is_pending(tmp_path: Path) -> None:
    folder = blocked(tmp_path)
    journal = Journal(folder)
    journal.event("k", "m")
    folder.parent.unlink()
    folder.mkdir(parents=True)
    journal.close()
    assert [r["message"] for r in records(folder)] == ["m"]


def test_folder_deleted_while_running(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    journal = Journal(folder)
    journal.event("k", "m")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    journal.event("k", "n")
    assert [r["message"] for r in records(folder)] == ["n"]


class FullDisk:
    """A file whose disk takes `room` more bytes; everything else is the real file."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> int:
        if self._room == 0:
            raise OSError(28, "No space left on device")
        return int(self._stream.write(data[: self._room]))


@pytest.mark.parametrize("room", [0, 1, 30])
def test_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    journal = Journal(tmp_path)
    journal.event("k", "before")
    size = (tmp_path / JSONL_NAME).stat().st_size
    original = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        stream = original(self, mode, *args, **kwargs)
        return FullDisk(stream, room) if "a" in mode else stream

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        journal.event("k", "during 1")
        journal.event("k", "during 2")
        assert (tmp_path / JSONL_NAME).stat().st_size == size, "half a line is taken back"
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    journal.event("k", "after")
    assert [r["message"] for r in records(tmp_path)] == ["before", "during 1", "during 2", "after"]
    assert human(tmp_path).count("\n") == 4


def test_lock_held_elsewhere_does_not_stop_the_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path, max_mb=0.0001)
    with filelock.FileLock(str(tmp_path / "kitchen.lock")):
        journal.event("k", "m" * 200)
        journal.event("k", "n" * 200)
    assert [r["message"][0] for r in records(tmp_path)] == ["m", "n"], "written, but not rotated without the lock"
    assert "cannot be written" not in caplog.text


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no locks here")

    journal = Journal(tmp_path)
    monkeypatch.setattr(journal._lock, "acquire", unsupported)
    journal.event("k", "m")
    assert [r["message"] for r in records(tmp_path)] == ["m"]


# --- many writers ------------------------------------------------------------------------------------------------


def test_threads(tmp_path: Path) -> None:
    journal = Journal(tmp_path, max_mb=0.02, keep=50)
    changed: list[int] = []

    def work(number: int) -> None:
        for n in range(50):
            journal.event("k", f"{number}-{n}", pad="é" * 50)
            if journal.once("shared", "once", "same"):
                changed.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read(tmp_path, 10_000)
    assert sorted(r["message"] for r in found if r["kind"] == "k") == sorted(
        f"{number}-{n}" for number in range(6) for n in range(50)
    )
    assert len(changed) == len([r for r in found if r["kind"] == "once"]) == 1
    assert len(list(tmp_path.glob("kitchen.jsonl.*"))) > 1


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import conftest
from kitchen_accel.journal import Journal
from kitchen_accel import journal as module
module._LOCK_WAIT_S = 60.0  # however busy this machine is
journal = Journal.open([Path(sys.argv[2])], max_mb=0.005, keep=100)
print("ready", flush=True)
sys.stdin.readline()
for n in range(200):
    journal.event("k", f"{sys.argv[3]}-{n}", pad="é" * (n % 90))
journal.close()
"""


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Every line of both is there once and whole, across many rotations."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(TESTS), str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:  # both start together
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert (writer.returncode, errors) == (0, "")
    files = list(tmp_path.glob(f"{JSONL_NAME}*"))
    assert len(files) > 2
    parsed = [json.loads(line) for f in files for line in f.read_bytes().decode("utf-8").split("\n")[:-1]]
    for name, writer in zip("ab", writers, strict=True):
        mine = [r["message"] for r in read(tmp_path, 10_000) if r["pid"] == writer.pid]
        assert mine == [f"{name}-{n}" for n in range(200)]
    assert len(parsed) == 400
    lines = [line for f in tmp_path.glob(f"{LOG_NAME}*") for line in f.read_text("utf-8").splitlines()]
    assert len(lines) == 400
    assert all(re.search(r" INFO    k: [ab]-\d+$", line) for line in lines)
