"""Real child processes that keep, or break, the protocol; their limits and their ends."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kitchen_accel.scheduler.build_process import disk_full, remove_folder
from kitchen_accel.tests.unit.build_bench import HANG, Bench, gone, until


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "cache with späce"
    folder.mkdir()
    made = Bench(folder)
    yield made
    made.close()


def test_a_reported_error_is_passed_on_with_traceback_and_log(bench: Bench) -> None:
    body = """
for n in range(100): print(f"line {n}", file=sys.stderr)
(job / "error.json").write_text(json.dumps({"type": "CaptureError", "message": "whole", "traceback": "Trace...",
    "what": "no rule for op x", "got": "x", "allowed": "y", "next_step": "use z"}))
sys.exit(1)
"""
    failure = bench.failure(bench.job(body))
    assert failure.kind == "child-error"
    assert failure.exit_code == 1
    assert failure.traceback == "Trace..."
    assert failure.log_tail == tuple(f"line {n}" for n in range(40, 100))
    assert failure.message == (
        "the build of tïny model.safetensors for openvino failed: no rule for op x; got 'x'; allowed: y; "
        "next step: use z."
    )
    assert bench.mark() is None


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ("print('who am I'); sys.exit(0)", "protocol", "no result.json; it printed 'who am I'"),
        ("(job / 'out').mkdir(); (job / 'result.json').write_text('{bad')", "protocol", "cannot be read"),
        ("(job / 'out').mkdir(); (job / 'result.json').write_text('[]')", "protocol", "without a JSON object"),
        ("(job / 'result.json').write_text('{}')", "protocol", "no folder 'out'"),
        ("finish(); sys.exit(3)", "exit", "exit code 3"),
        ("raise ValueError('early')", "exit", "exit code 1"),
        ("(job / 'error.json').write_text('x' * 10); sys.exit(2)", "exit", "exit code 2"),
        ("(job / 'error.json').write_text('{\"type\": \"E\"}'); sys.exit(2)", "child-error", "failed: E"),
        ("(job / 'error.json').write_text('{\"disk_full\": true}'); sys.exit(2)", "disk-full", "make room"),
    ],
)
def test_every_wrong_end_has_its_own_words(bench: Bench, body: str, kind: str, words: str) -> None:
    failure = bench.failure(bench.job(body))
    assert failure.kind == kind
    assert words in failure.message.replace('"', "'")
    assert "next step" in failure.message
    assert bench.mark() is None
    if "early" in body:
        assert failure.log_tail[-1] == "ValueError: early"


def test_a_program_that_is_not_there(bench: Bench) -> None:
    failure = bench.failure(bench.job("", command=(str(bench.folder / "no python"),)))
    assert failure.kind == "start"
    assert "FileNotFoundError" in failure.message
    assert failure.exit_code is None


def test_a_hang_is_stopped_at_the_time_limit(bench: Bench) -> None:
    failure = bench.failure(bench.job(HANG, timeout_s=0.5))
    assert failure.kind == "timeout"
    assert gone(int(bench.pid_file.read_text()))
    assert bench.mark() is None


def test_a_flood_of_output_does_not_outrun_the_time_limit(bench: Bench) -> None:
    body = "alive()\nwhile True: sys.stdout.write('garbage\\n' * 1000); say('flood', 0.5)\n"
    assert bench.failure(bench.job(body, timeout_s=0.6)).kind == "timeout"
    assert gone(int(bench.pid_file.read_text()))


@pytest.mark.parametrize("where", ["child", "grandchild"])
def test_a_memory_hog_is_stopped_at_its_ceiling(bench: Bench, where: str) -> None:
    hog = "import time; b = bytearray(400 * 1024**2); time.sleep(60)"
    body = f"alive()\nhog = {hog!r}\n"
    body += "exec(hog)" if where == "child" else "import subprocess; subprocess.run([sys.executable, '-I', '-c', hog])"
    failure = bench.failure(bench.job(body, memory_ceiling_bytes=200 * 1024**2))
    assert failure.kind == "memory"
    assert "at most 0.20 GiB" in failure.message
    assert gone(int(bench.pid_file.read_text()))
    assert bench.mark() is None


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_what_a_child_leaves_running_goes_with_it(bench: Bench) -> None:
    body = """
import subprocess
left = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(60)"])
pathlib.Path(spec["pid_file"]).write_text(str(left.pid))
finish()
"""
    assert bench.run(bench.job(body)).status == "done"
    until(lambda: gone(int(bench.pid_file.read_text())), 1.0)


def test_the_child_runs_at_low_priority(bench: Bench) -> None:
    ticket = bench.queue.submit(bench.job(HANG))
    child = bench.child()
    if sys.platform == "win32":
        low = psutil.BELOW_NORMAL_PRIORITY_CLASS
    else:
        low = max(10, psutil.Process().nice())
    until(lambda: child.nice() == low)
    bench.queue.cancel()
    bench.end(ticket)


def test_a_child_somebody_waits_for_keeps_its_priority(bench: Bench) -> None:
    ticket = bench.queue.submit(bench.job(HANG, low_priority=False))
    child = bench.child()
    until(lambda: bench.queue.state(ticket.key_digest).status == "building")  # type: ignore[union-attr]
    assert child.nice() == psutil.Process().nice()
    bench.queue.cancel()
    bench.end(ticket)


def test_a_full_disk_is_seen_behind_any_error() -> None:
    handled = KeyError("while handling")
    handled.__context__ = OSError(errno.ENOSPC, "full")
    assert disk_full(handled)
    assert not disk_full(OSError(errno.EACCES, "no"))
    loop = ValueError()
    loop.__cause__ = other = ValueError()
    other.__cause__ = loop
    assert not disk_full(loop)


def test_a_folder_that_is_in_use_is_waited_for_then_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, tries = shutil.rmtree, 0

    def busy(folder: Path) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise PermissionError(errno.EACCES, "the file is used by another process")
        real(folder)

    monkeypatch.setattr(shutil, "rmtree", busy)
    folder = tmp_path / "job"
    folder.mkdir()
    remove_folder(folder)
    assert not folder.exists()
    tries = -1000
    folder.mkdir()
    remove_folder(folder, patience_s=0.1)
    assert folder.exists()
    assert "cannot be removed" in caplog.text
