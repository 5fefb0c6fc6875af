"""A workbench for tests of the build queue: real child processes from small programs, and what they leave."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from kitchen_accel.scheduler.builds import BuildEvent, BuildFailure, BuildJob, BuildQueue, BuildState, BuildTicket

ROOT = Path(__file__).resolve().parents[2]
KEY = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4

HEAD = """
import json, os, pathlib, sys, time
job = pathlib.Path(sys.argv[1])
spec = json.loads((job / "job.json").read_text(encoding="utf-8"))
def say(phase, fraction):
    print(json.dumps({"phase": phase, "fraction": fraction}), flush=True)
def finish(**result):
    (job / "out").mkdir()
    (job / "out" / "engine.bin").write_bytes(b"engine")
    (job / "result.json").write_text(json.dumps(result))
def alive():
    pathlib.Path(spec["pid_file"]).write_text(str(os.getpid()))
"""
HANG = "alive()\nsay('hang', 0.2)\ntime.sleep(60)\n"


class Bench:
    """One queue, and all that its callables left: events, committed folders, the staging folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.staging = folder / "staging"
        self.staging.mkdir()
        self.markers = folder / "markers"
        self.pid_file = folder / "pid"
        self.events: list[BuildEvent] = []
        self.committed: list[tuple[list[str], dict[str, Any], float]] = []
        self.queue = BuildQueue(self.events.append, markers=self.markers)
        self.scripts = 0

    def job(self, body: str, key: str = KEY, **changes: Any) -> BuildJob:
        self.scripts += 1
        script = self.folder / f"child {self.scripts} ü.py"
        script.write_text(HEAD + body, encoding="utf-8")
        fields: dict[str, Any] = {
            "key_digest": key,
            "backend": "openvino",
            "label": "tïny model.safetensors",
            "spec": {"pid_file": str(self.pid_file)},
            "prepare": lambda job_dir, cancelled: (job_dir / "weights.safetensors").write_bytes(b"weights"),
            "command": (sys.executable, "-I", "-X", "utf8", str(script)),
            "env": {},
            "stage": self.stage,
            "commit": self.commit,
            "timeout_s": 60.0,
        }
        return BuildJob(**{**fields, **changes})

    def stage(self) -> Path:
        folder = self.staging / f"job ö {len(list(self.staging.iterdir()))}"
        folder.mkdir()
        return folder

    def commit(self, out: Path, result: dict[str, Any], build_s: float) -> None:
        self.committed.append((sorted(p.name for p in out.iterdir()), result, build_s))

    def run(self, job: BuildJob) -> BuildState:
        return self.end(self.queue.submit(job))

    def end(self, ticket: BuildTicket) -> BuildState:
        deadline = time.monotonic() + 30

        def poll() -> None:
            assert time.monotonic() < deadline, "the build did not end"

        return self.queue.wait(ticket, poll, 0.02)

    def failure(self, job: BuildJob) -> BuildFailure:
        state = self.run(job)
        assert state.status == "failed"
        assert state.failure is not None
        assert not self.committed
        self.check_clean()
        return state.failure

    def close(self) -> None:
        self.queue.close()

    def check_clean(self) -> None:
        assert list(self.staging.iterdir()) == []

    def mark(self) -> dict[str, Any] | None:
        path = self.markers / f"{KEY[:20]}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def child(self) -> psutil.Process:
        until(lambda: self.pid_file.exists() and self.pid_file.read_text() != "")
        return psutil.Process(int(self.pid_file.read_text()))


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
