"""Builds that die, alone or with the whole server, and what is remembered of it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kitchen_accel.scheduler.builds import BuildQueue
from kitchen_accel.scheduler.crash_marks import MARK_MAX_AGE_S
from kitchen_accel.tests.unit.build_bench import HANG, KEY, OTHER, ROOT, Bench, gone, until


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "cache with späce"
    folder.mkdir()
    made = Bench(folder)
    yield made
    made.close()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals")
@pytest.mark.parametrize(
    ("body", "name", "step"),
    [
        ("os.kill(os.getpid(), 9)", "SIGKILL", "out of memory"),
        ("import signal; signal.raise_signal(signal.SIGSEGV)", "SIGSEGV", "native library"),
    ],
)
def test_a_child_that_dies_by_a_signal_leaves_a_mark(bench: Bench, body: str, name: str, step: str) -> None:
    failure = bench.failure(bench.job("import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n" + body))
    assert failure.kind == "killed"
    assert name in failure.message
    assert step in failure.message
    mark = bench.mark()
    assert mark is not None
    assert (mark["attempts"], mark["pid"], mark["last_error"]) == (1, 0, failure.message)


@pytest.mark.skipif(sys.platform == "win32", reason="a killed process has an ordinary exit code on Windows")
def test_two_crashes_bar_the_key_across_restarts(bench: Bench) -> None:
    for attempt in (1, 2):
        ticket = bench.queue.submit(bench.job(HANG))
        bench.child().kill()
        state = bench.end(ticket)
        assert state.failure is not None
        assert (state.failure.kind, state.failure.exit_code) == ("killed", -9)
        assert bench.mark()["attempts"] == attempt  # type: ignore[index]
        bench.pid_file.unlink()
        # a new process knows nothing but the mark
        bench.queue.close()
        bench.queue = BuildQueue(bench.events.append, markers=bench.markers)
    failure = bench.failure(bench.job("finish()"))
    assert failure.kind == "refused"
    assert "2 times" in failure.message
    mark_file = bench.markers / f"{KEY[:20]}.json"
    assert str(mark_file) in failure.message
    assert not bench.pid_file.exists()
    # another key is not barred by it, and the mark's own key is free again without it
    assert bench.run(bench.job("finish()", OTHER)).status == "done"
    mark_file.unlink()
    assert bench.run(bench.job("finish()")).status == "done"
    assert bench.mark() is None


def write_mark(bench: Bench, **changes: Any) -> None:
    mark = {"key_digest": KEY, "label": "x", "attempts": 2, "last_error": "boom", "updated": time.time(), "format": 1}
    bench.markers.mkdir(exist_ok=True)
    (bench.markers / f"{KEY[:20]}.json").write_text(json.dumps(mark | changes), encoding="utf-8")


def test_a_mark_counts_a_week(bench: Bench) -> None:
    write_mark(bench, updated=time.time() - MARK_MAX_AGE_S + 600)
    assert bench.failure(bench.job("finish()")).kind == "refused"
    write_mark(bench, updated=time.time() - MARK_MAX_AGE_S - 1)
    assert bench.run(bench.job("finish()")).status == "done"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempts": 9}', "\x00" * 50])
def test_a_damaged_mark_bars_nothing(bench: Bench, text: str) -> None:
    bench.markers.mkdir()
    (bench.markers / f"{KEY[:20]}.json").write_text(text)
    assert bench.run(bench.job("finish()")).status == "done"
    assert bench.mark() is None


def test_a_build_that_runs_in_another_living_server_is_no_crash(bench: Bench) -> None:
    me = psutil.Process()
    machine = hashlib.sha256(platform.node().encode()).hexdigest()[:16]
    write_mark(bench, machine=machine, pid=me.pid, pid_started=me.create_time())
    assert bench.run(bench.job("finish()")).status == "done"
    write_mark(bench, machine=machine, pid=me.pid, pid_started=me.create_time() - 3600)
    state = bench.run(bench.job("finish()"))
    assert state.failure is not None
    assert state.failure.kind == "refused"
    bench.check_clean()


def test_a_cancelled_build_keeps_the_count_of_earlier_crashes(bench: Bench) -> None:
    write_mark(bench, attempts=1)
    before = bench.mark()
    ticket = bench.queue.submit(bench.job(HANG))
    bench.child()
    during = bench.mark()
    assert during is not None
    assert (during["attempts"], during["pid"]) == (2, os.getpid())
    bench.queue.cancel(KEY)
    assert bench.end(ticket).status == "cancelled"
    after = bench.mark()
    assert before is not None
    assert after is not None
    assert {k: after[k] for k in before} == before
    assert after["pid"] == 0


def test_a_markers_folder_that_cannot_be_made_costs_no_build(bench: Bench) -> None:
    bench.markers.write_text("a file is in the way")
    assert bench.run(bench.job("finish()")).status == "done"


PARENT = """
import json, os, pathlib, sys, time, types
root, folder, command = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
package = types.ModuleType("kitchen_accel"); package.__path__ = [root]; sys.modules["kitchen_accel"] = package
from kitchen_accel.scheduler.builds import BuildJob, BuildQueue
def stage():
    (folder / "job").mkdir()
    return folder / "job"
queue = BuildQueue(lambda event: None, markers=folder / "markers")
spec = {"root": root, "pid_file": str(folder / "pid")}
queue.submit(BuildJob(key_digest=KEY, backend="openvino", label="x", spec=spec,
    prepare=lambda job_dir, cancelled: None, command=tuple(command), env={}, stage=stage, commit=print, timeout_s=60))
END
"""
WATCHING = """
import types
package = types.ModuleType("kitchen_accel"); package.__path__ = [spec["root"]]; sys.modules["kitchen_accel"] = package
from kitchen_accel.scheduler import child
"""
# each way by itself: on Linux the kernel would hide that the others do not work
WATCH_ONE = "import threading\nthreading.Thread(target=child.{}, daemon=True).start()\n"
# a match that takes years, and holds Python's lock all the while
BLOCKED = "import re\nchild.watch_parent()\nalive()\nre.match('(a+)+b', 'a' * 60)\n"


def start_server(bench: Bench, body: str, end: str) -> subprocess.Popen[bytes]:
    command = bench.job(WATCHING + body).command
    code = PARENT.replace("KEY", repr(KEY)).replace("END", end)
    return subprocess.Popen([sys.executable, "-c", code, str(ROOT), str(bench.folder), *command])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("child.watch_parent()\n" + HANG, id="as-it-is"),
        pytest.param(WATCH_ONE.format("_exit_at_end_of_input") + HANG, id="by-input"),
        pytest.param(WATCH_ONE.format("_exit_with_parent") + HANG, id="by-number"),
        pytest.param(
            BLOCKED,
            id="lock-held",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel"),
        ),
    ],
)
def test_a_killed_server_takes_the_build_with_it_and_leaves_its_mark(bench: Bench, body: str) -> None:
    server = start_server(bench, body, "time.sleep(60)")
    try:
        child = bench.child()
        mark = bench.mark()
        assert mark is not None
        assert mark["pid"] == server.pid
    finally:
        server.kill()
        server.wait(10)
    until(lambda: gone(child.pid), 2.0)
    assert bench.mark() == mark
    # the next start counts it, and tries once more
    ticket = bench.queue.submit(bench.job("alive()\nwhile not (job / 'go').exists(): time.sleep(0.01)"))
    bench.pid_file.unlink()
    bench.child()
    again = bench.mark()
    assert again is not None
    assert (again["attempts"], again["pid"]) == (2, os.getpid())
    bench.queue.cancel()
    assert bench.end(ticket).status == "cancelled"
    left = bench.mark()
    assert left is not None
    assert (left["attempts"], left["pid"]) == (1, 0)


def test_an_orderly_end_of_the_server_is_no_crash(bench: Bench) -> None:
    server = start_server(
        bench, "child.watch_parent()\n" + HANG, "while not (folder / 'end').exists(): time.sleep(0.01)"
    )
    child = bench.child()
    (bench.folder / "end").touch()
    assert server.wait(10) == 0
    until(lambda: gone(child.pid), 2.0)
    assert not (bench.folder / "job").exists()
    assert bench.mark() is None
