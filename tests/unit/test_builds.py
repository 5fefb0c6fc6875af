"""The build queue: order, cancelling, failures of the host's callables, and the end of the queue."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kitchen_accel.errors import BuildCancelled, BuildError, CacheError
from kitchen_accel.scheduler.build_process import PARENT_VARIABLE
from kitchen_accel.scheduler.builds import BuildEvent, BuildQueue
from kitchen_accel.tests.unit.build_bench import HANG, KEY, OTHER, Bench, gone, until


class Interrupted(Exception):
    """What ComfyUI raises when the user presses stop."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    folder = tmp_path / "cache with späce"
    folder.mkdir()
    made = Bench(folder)
    yield made
    made.close()


def test_a_build_is_committed_and_leaves_nothing_behind(bench: Bench) -> None:
    body = (
        f"assert (job / 'weights.safetensors').read_bytes() == b'weights'\nparent = os.environ[{PARENT_VARIABLE!r}]\n"
    )
    body += "finish(parent=parent, word=os.environ['WORD'], spec=spec['word'])\n"
    state = bench.run(bench.job(body, env={"WORD": "wörd"}, spec={"word": "schön"}))
    assert state.status == "done"
    assert state.fraction == 1.0
    assert state.eta_s is None
    assert state.elapsed_s > 0
    ((names, result, build_s),) = bench.committed
    assert names == ["engine.bin"]
    assert result == {"parent": str(os.getpid()), "word": "wörd", "spec": "schön"}
    assert 0 < build_s <= state.elapsed_s
    bench.check_clean()
    assert bench.mark() is None
    assert [e.state.status for e in bench.events if e.step] == ["queued", "preparing", "building", "done"]
    assert bench.queue.state(KEY) == state
    assert bench.queue.state(OTHER) is None


def test_progress_never_falls_and_stray_output_is_no_harm(bench: Bench) -> None:
    body = """
say("capture", 0.1); say("capture", 0.6); say("convert", 0.3); say("convert", float("nan")); say("convert", True)
say("compile", 7)
print("some library's banner"); print("[1, 2]"); print('{"phase": 1, "fraction": 0.2}'); print("x" * 300000)
sys.stdout.buffer.write(b"\\xff\\xfe\\n"); finish()
"""
    assert bench.run(bench.job(body)).status == "done"
    told = [(e.state.phase, e.state.fraction) for e in bench.events if not e.step]
    assert told == [("capture", 0.1), ("capture", 0.6), ("convert", 0.6), ("compile", 1.0)]


def test_the_remaining_time_is_told_once_there_is_something_to_go_by(bench: Bench) -> None:
    body = "say('capture', 0.04)\nwhile not (job / 'go').exists(): time.sleep(0.01)\nsay('capture', 0.5)\n" + HANG
    seen: list[Path] = []
    ticket = bench.queue.submit(bench.job(body, prepare=lambda job_dir, cancelled: seen.append(job_dir)))
    until(lambda: any(not e.step for e in bench.events))
    first = bench.queue.state(KEY)
    assert first is not None
    assert (first.fraction, first.eta_s) == (0.04, None)
    (seen[0] / "go").touch()
    until(lambda: any(e.state.fraction == 0.5 for e in bench.events))
    later = bench.queue.state(KEY)
    assert later is not None
    assert later.eta_s is not None
    assert 0 < later.eta_s <= later.elapsed_s
    assert "50%" in later.text
    bench.queue.cancel(KEY)
    assert bench.end(ticket).status == "cancelled"


def test_builds_run_one_at_a_time_in_order(bench: Bench) -> None:
    lock = bench.folder / "lock"
    body = (
        f"p = pathlib.Path({str(lock)!r})\np.touch(exist_ok=False)\ntime.sleep(0.1)\np.unlink()\nfinish(n=spec['n'])\n"
    )
    keys = [f"{n:064x}" for n in range(3)]
    tickets = [bench.queue.submit(bench.job(body, key, spec={"n": n})) for n, key in enumerate(keys)]
    assert [bench.end(t).status for t in tickets] == ["done"] * 3
    assert [result["n"] for _, result, _ in bench.committed] == [0, 1, 2]
    assert [s.key_digest for s in bench.queue.states()] == keys


def test_a_key_is_queued_once(bench: Bench) -> None:
    job = bench.job(HANG)
    first = bench.queue.submit(job)
    bench.child()
    again = bench.queue.submit(bench.job("finish()"))
    assert again == first
    bench.queue.cancel()
    assert bench.end(first).status == "cancelled"
    # done and cancelled keys may be built again: the engine may have been evicted
    assert bench.run(bench.job("finish()")).status == "done"
    assert bench.run(bench.job("finish()")).status == "done"
    assert len(bench.committed) == 2


def test_a_failed_key_is_not_retried_until_it_is_forgotten(bench: Bench) -> None:
    assert bench.failure(bench.job("sys.exit(5)")).kind == "exit"
    events = len(bench.events)
    assert bench.run(bench.job("finish()")).status == "failed"
    assert len(bench.events) == events
    # "stop everything" is no wish to try again
    bench.queue.cancel()
    assert bench.run(bench.job("finish()")).status == "failed"
    bench.queue.forget(KEY)
    assert bench.queue.state(KEY) is None
    assert bench.run(bench.job("finish()")).status == "done"


@pytest.mark.parametrize("apart", [False, True])
def test_an_interrupt_ends_a_running_build_with_its_whole_tree(bench: Bench, apart: bool) -> None:
    body = (
        """
import subprocess
(job / "out").mkdir(); (job / "out" / "half.bin").write_bytes(b"x" * 1000)
inner = "import pathlib, os, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
subprocess.Popen([sys.executable, "-I", "-c", inner, spec["pid_file"] + "2"], stdout=subprocess.DEVNULL,
    start_new_session=APART)
while not pathlib.Path(spec["pid_file"] + "2").exists(): time.sleep(0.01)
"""
        + HANG
    )
    ticket = bench.queue.submit(bench.job(body.replace("APART", str(apart))))
    child = bench.child()
    second = bench.folder / "pid2"
    until(lambda: second.read_text() != "")
    began = 0.0

    def poll() -> None:
        nonlocal began
        began = time.monotonic()
        raise Interrupted

    with pytest.raises(Interrupted):
        bench.queue.wait(ticket, poll)
    assert time.monotonic() - began < 1.0
    state = bench.queue.state(KEY)
    assert state is not None
    assert state.status == "cancelled"
    bench.check_clean()
    assert not bench.committed
    assert gone(child.pid)
    assert gone(int(second.read_text()))
    assert bench.mark() is None


def test_cancelling_while_queued(bench: Bench) -> None:
    running = bench.queue.submit(bench.job(HANG))
    bench.child()
    waiting = bench.queue.submit(bench.job("finish()", OTHER))

    def poll() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        bench.queue.wait(waiting, poll)
    state = bench.queue.state(OTHER)
    assert state is not None
    assert state.status == "cancelled"
    other = bench.queue.state(KEY)
    assert other is not None
    assert other.status == "building"
    bench.queue.cancel(KEY)
    assert bench.end(running).status == "cancelled"
    assert [e.state.status for e in bench.events if e.state.key_digest == OTHER] == ["queued", "cancelled"]
    bench.check_clean()


@pytest.mark.parametrize("raises", [False, True])
def test_cancelling_while_preparing(bench: Bench, raises: bool) -> None:
    entered = threading.Event()

    def prepare(job_dir: Path, cancelled: Callable[[], bool]) -> None:
        (job_dir / "weights.safetensors").write_bytes(b"half")
        entered.set()
        until(cancelled)
        if raises:
            raise RuntimeError("stopped on request")

    ticket = bench.queue.submit(bench.job("alive(); finish()", prepare=prepare))
    assert entered.wait(10)
    began = time.monotonic()
    bench.queue.cancel(KEY)
    assert bench.end(ticket).status == "cancelled"
    assert time.monotonic() - began < 1.0
    bench.check_clean()
    assert not bench.pid_file.exists()
    assert bench.mark() is None


def test_a_new_build_waits_behind_the_one_that_is_being_cancelled(bench: Bench) -> None:
    release, entered = threading.Event(), threading.Event()

    def prepare(job_dir: Path, cancelled: Callable[[], bool]) -> None:
        entered.set()
        release.wait(10)

    old = bench.queue.submit(bench.job("finish()", prepare=prepare))
    assert entered.wait(10)
    bench.queue.cancel(KEY)
    new = bench.queue.submit(bench.job("finish()"))
    assert new != old
    release.set()
    assert bench.end(old).status == "cancelled"
    assert bench.end(new).status == "done"
    assert len(bench.committed) == 1


def test_an_interrupt_does_not_wait_for_a_preparation_that_does_not_listen(bench: Bench) -> None:
    release = threading.Event()
    ticket = bench.queue.submit(bench.job("finish()", prepare=lambda job_dir, cancelled: release.wait(10)))
    began = 0.0

    def poll() -> None:
        nonlocal began
        began = time.monotonic()
        raise Interrupted

    with pytest.raises(Interrupted):
        bench.queue.wait(ticket, poll)
    assert time.monotonic() - began < 1.0
    release.set()
    assert bench.end(ticket).status == "cancelled"
    bench.check_clean()


def write_to_full_disk() -> None:
    with Path("/dev/full").open("wb") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("weights moved"), "prepare", "RuntimeError: weights moved"),
        (CacheError("no room", next_step="dust"), "prepare", "no room; next step: dust"),
        (OSError(errno.ENOSPC, "No space left"), "disk-full", "make room"),
    ],
)
def test_a_preparation_that_raises(bench: Bench, error: Exception, kind: str, words: str) -> None:
    def prepare(job_dir: Path, cancelled: Callable[[], bool]) -> None:
        raise error

    failure = bench.failure(bench.job("alive(); finish()", prepare=prepare))
    assert failure.kind == kind
    assert words in failure.message
    assert failure.message.count("next step") == 1
    assert type(error).__name__ in failure.traceback
    assert not bench.pid_file.exists()
    assert bench.mark() is None


def test_a_preparation_may_cancel_itself(bench: Bench) -> None:
    def prepare(job_dir: Path, cancelled: Callable[[], bool]) -> None:
        raise BuildCancelled("the model was unloaded")

    assert bench.run(bench.job("finish()", prepare=prepare)).status == "cancelled"
    bench.check_clean()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("where", ["prepare", "commit"])
def test_a_full_disk_leaves_no_mark_and_says_what_to_do(bench: Bench, where: str) -> None:
    def fill(*_: object) -> None:
        try:
            write_to_full_disk()
        except OSError as error:
            raise CacheError("the engine cannot be stored", got=str(error)) from error

    failure = bench.failure(bench.job("finish()", KEY, **{where: fill}))
    assert failure.kind == "disk-full"
    assert "make room on the disk" in failure.message
    assert bench.mark() is None


def test_a_commit_that_raises_is_a_failure_of_the_cache(bench: Bench) -> None:
    def commit(out: Path, result: dict[str, Any], build_s: float) -> None:
        raise CacheError("the entry is locked", next_step="close the other server")

    failure = bench.failure(bench.job("finish()", commit=commit))
    assert failure.kind == "commit"
    assert "the entry is locked; next step: close the other server" in failure.message


def test_a_cache_that_cannot_be_written_is_told_and_nothing_starts(bench: Bench) -> None:
    def stage() -> Path:
        raise CacheError("the cache folder is read-only", got="/mnt/x", next_step="choose another")

    failure = bench.failure(bench.job("alive()", stage=stage))
    assert failure.kind == "stage"
    assert "the cache folder is read-only; got '/mnt/x'; next step: choose another" in failure.message
    assert not bench.pid_file.exists()
    assert not bench.markers.exists()


def test_a_spec_that_is_no_json_is_a_failure_not_a_crash(bench: Bench) -> None:
    assert bench.failure(bench.job("finish()", spec={"x": object()})).kind == "prepare"


def test_the_queue_survives_a_listener_that_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def listener(event: BuildEvent) -> None:
        raise RuntimeError("a bug in the panel")

    bench = Bench(tmp_path)
    bench.queue = BuildQueue(listener)
    try:
        assert bench.run(bench.job("finish()")).status == "done"
    finally:
        bench.queue.close()
    assert "a bug in the panel" in caplog.text
    assert bench.mark() is None


def test_closing_kills_the_child_and_ends_the_thread(bench: Bench) -> None:
    ticket = bench.queue.submit(bench.job(HANG))
    queued = bench.queue.submit(bench.job("finish()", OTHER))
    child = bench.child()
    bench.queue.close()
    bench.queue.close()
    assert gone(child.pid)
    assert [bench.end(t).status for t in (ticket, queued)] == ["cancelled", "cancelled"]
    assert not [t for t in threading.enumerate() if t.name.startswith("kitchen-build")]
    bench.check_clean()
    assert bench.mark() is None
    with pytest.raises(BuildError, match="closed"):
        bench.queue.submit(bench.job("finish()", "a" * 64))


def test_a_queue_that_was_never_used_has_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    queue = BuildQueue(lambda event: None, markers=tmp_path / "markers")
    assert threading.active_count() == before
    queue.close()
    assert not (tmp_path / "markers").exists()


@pytest.mark.parametrize("key", ["", "abc", "../" * 10, "A" * 64, "0" * 129])
def test_a_key_that_is_no_digest_is_refused(bench: Bench, key: str) -> None:
    with pytest.raises(ValueError, match="key_digest"):
        bench.job("", key)
    with pytest.raises(ValueError, match="command"):
        bench.job("", command=())
