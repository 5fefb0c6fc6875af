"""The build process: with a tiny real network and a backend that says openly that it is a fake."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel import backends
from kitchen_accel.backends.base import (
    BuildOptions,
    BuildResult,
    DimRange,
    InputProfile,
    LibraryFacts,
    Measurement,
    ProgressFn,
    ShapeProfile,
)
from kitchen_accel.errors import BuildError, CaptureError, KitchenError
from kitchen_accel.scheduler.builds import BuildEvent, BuildJob, BuildQueue
from kitchen_accel.scheduler.child import JobSpec, main, result_from_json, result_to_json

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ShapeProfile(
    (
        InputProfile("x", "float32", (DimRange("batch", 1, 4), 4, DimRange("height", 8, 64, 8))),
        InputProfile("timesteps", "float32", (DimRange("batch", 1, 4),)),
    )
)
SPEC = JobSpec("openvino", PROFILE, BuildOptions("CPU", (("hint", "latency"),)), {"width": 4, "name": "ü"}, threads=1)


class FakeBackend:
    """Stores the module's answer instead of an engine, so that a test can see that it was really called."""

    id = "openvino"

    def __init__(self, error: Exception | None = None, writes: bool = True, psnr_db: float = 999.0) -> None:
        self.error, self.writes, self.psnr_db = error, writes, psnr_db
        self.threads = 0

    def probe(self) -> LibraryFacts:
        return LibraryFacts("fake", "0")

    def build(
        self,
        module: torch.nn.Module,
        example: Mapping[str, torch.Tensor],
        profile: ShapeProfile,
        options: BuildOptions,
        folder: Path,
        progress: ProgressFn,
    ) -> BuildResult:
        self.threads = torch.get_num_threads()
        progress("capture", 0.5)
        sys.stdout.write("a library that prints where the protocol is\n")
        os.write(1, b"and a native one\n")
        if self.error is not None:
            raise self.error
        progress("measure", 0.25)
        with torch.no_grad():
            answer = module(**example)
        if self.writes:
            (folder / "answer.json").write_text(json.dumps(answer.tolist()), encoding="utf-8")
        progress("measure", 1.0)
        return BuildResult(
            profile, (Measurement("fp32", "static", self.psnr_db, 0.5, 1.0),), (("device", options.device),)
        )


class Doubler(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def make_module(network: dict[str, Any], job_dir: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    assert job_dir.is_dir()
    assert network["name"] == "ü"
    return Doubler(network["width"]).eval(), {"x": torch.arange(4.0)}


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "jöb with space"
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(SPEC.to_json()), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def use(monkeypatch: pytest.MonkeyPatch, backend: FakeBackend) -> None:
    def create(backend_id: str) -> FakeBackend:
        assert backend_id == "openvino"
        return backend

    monkeypatch.setattr(backends, "create", create)


def report(job_dir: Path) -> dict[str, Any]:
    assert not (job_dir / "result.json").exists()
    content = json.loads((job_dir / "error.json").read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def test_a_build_leaves_its_files_and_its_result(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    backend = FakeBackend()
    use(monkeypatch, backend)
    assert main(job_dir, make_module, watch=False) == 0
    assert json.loads((job_dir / "out" / "answer.json").read_text()) == [0.0, 2.0, 4.0, 6.0]
    assert sorted(p.name for p in job_dir.iterdir()) == ["job.json", "out", "result.json"]
    result = result_from_json(json.loads((job_dir / "result.json").read_text()))
    assert result == BuildResult(PROFILE, (Measurement("fp32", "static", 999.0, 0.5, 1.0),), (("device", "CPU"),))
    assert backend.threads == 1
    said, other = capfd.readouterr()
    steps = [json.loads(line) for line in said.splitlines()]
    assert [s["phase"] for s in steps] == ["load", "load", "capture", "measure", "measure", "finish"]
    fractions = [s["fraction"] for s in steps]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert "a library that prints" in other
    assert "and a native one" in other
    # standard output is itself again afterwards
    sys.stdout.write("after\n")
    os.write(1, b"all\n")
    assert sorted(capfd.readouterr().out.split()) == ["after", "all"]


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (
            CaptureError("no rule for aten::x", got=3, allowed="aten::y", next_step="pick auto"),
            {"type": "CaptureError", "what": "no rule for aten::x", "got": "3", "next_step": "pick auto"},
        ),
        (ValueError("shape"), {"type": "ValueError", "message": "shape", "disk_full": False}),
        (MemoryError(), {"type": "MemoryError"}),
        (OSError(28, "No space left on device"), {"type": "OSError", "disk_full": True}),
    ],
)
def test_an_error_is_reported_whole(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception,
    parts: dict[str, Any],
) -> None:  # fmt: skip
    use(monkeypatch, FakeBackend(error))
    assert main(job_dir, make_module, watch=False) == 1
    content = report(job_dir)
    assert {k: content[k] for k in parts} == parts
    assert "in build" in content["traceback"]
    assert type(error).__name__ in capfd.readouterr().err


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (FakeBackend(writes=False), "wrote no file"),
        (FakeBackend(psnr_db=float("inf")), "measurements.0.psnr_db"),
        (FakeBackend(psnr_db=float("nan")), "measurements.0.psnr_db"),
    ],
)
def test_a_backend_that_breaks_its_contract_is_found_out(
    job_dir: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, words: str
) -> None:
    use(monkeypatch, backend)
    assert main(job_dir, make_module, watch=False) == 1
    assert words in report(job_dir)["message"]


def test_a_network_that_cannot_be_made(job_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, FakeBackend())

    def broken(network: dict[str, Any], job_dir: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        raise KeyError("unet_config")

    assert main(job_dir, broken, watch=False) == 1
    assert report(job_dir)["type"] == "KeyError"
    assert not (job_dir / "out").exists()


def test_a_backend_of_another_version(job_dir: Path) -> None:
    spec = {**SPEC.to_json(), "backend": "cuda"}
    (job_dir / "job.json").write_text(json.dumps(spec), encoding="utf-8")
    assert main(job_dir, make_module, watch=False) == 1
    assert report(job_dir)["type"] == "BackendError"


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"format": 1}', '{"format": 2}', "\xff"])
def test_a_damaged_job_is_an_error_that_says_so(job_dir: Path, text: str | None) -> None:
    path = job_dir / "job.json"
    path.unlink()
    if text is not None:
        path.write_text(text, encoding="latin-1")
    assert main(job_dir, make_module, watch=False) == 1
    content = report(job_dir)
    assert content["type"] == "BuildError"
    assert content["message"].startswith("the build job ")


def test_a_spec_survives_the_journey() -> None:
    assert JobSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"backend": "opencl"}, "backend"),
        ({"threads": "2"}, "threads"),
        ({"threads": True}, "threads"),
        ({"threads": -1}, "threads"),
        ({"extra": 1}, "extra"),
        ({"options": {"device": "CPU", "options": [["a"]]}}, "options.options"),
        ({"options": {"device": "CPU", "speed": 1}}, "options.speed"),
        ({"profile": {"inputs": [{"name": "x", "dtype": "float32", "dims": [1.5]}]}}, "profile.inputs.0.dims.0"),
        ({"profile": {"inputs": [{"name": "x", "dtype": "float32", "dims": [], "z": 0}]}}, "profile.inputs.0.z"),
        ({"network": []}, "network"),
    ],
)
def test_a_wrong_spec_names_its_field(change: dict[str, Any], where: str) -> None:
    with pytest.raises(BuildError) as caught:
        JobSpec.from_json(SPEC.to_json() | change)
    assert where in str(caught.value)


def test_a_result_survives_the_journey_and_a_wrong_one_names_its_field() -> None:
    result = BuildResult(PROFILE, (Measurement("bf16", "dynamic", 41.5, 0.25, 2.0),), (("a", "b"),))
    content = json.loads(json.dumps(result_to_json(result)))
    assert result_from_json(content) == result
    for change, where in (
        ({"measurements": [{"precision": "fp8"}]}, "measurements.0"),
        ({"notes": [["a", 1]]}, "notes.0.1"),
        ({"more": 1}, "more"),
        ({"profile": None}, "profile"),
    ):
        with pytest.raises(BuildError, match=where):
            result_from_json(content | change)
    with pytest.raises(KitchenError):
        result_from_json({})


PROGRAM = """
import os, sys, types
from pathlib import Path
package = types.ModuleType("kitchen_accel")
package.__path__ = [sys.argv[1]]
sys.modules["kitchen_accel"] = package
from kitchen_accel import backends
from kitchen_accel.backends.base import BuildResult
from kitchen_accel.scheduler.child import main
class FakeBackend:
    def build(self, module, example, profile, options, folder, progress):
        os.write(1, b"a native library's greeting\\n")
        progress("capture", 0.5)
        (folder / "engine.bin").write_bytes(Path(module).read_bytes())
        return BuildResult(profile, (), (("threads", str(example["n"])),))
backends.create = lambda backend: FakeBackend()
def make_module(network, job_dir):
    if network["fail"]:
        raise LookupError("no such network")
    return job_dir / "weights.safetensors", {"n": 1}
os._exit(main(Path(sys.argv[2]), make_module))
"""


@pytest.mark.parametrize("fail", [False, True])
def test_queue_and_child_speak_the_same_language(tmp_path: Path, fail: bool) -> None:
    program = tmp_path / "build child.py"
    program.write_text(PROGRAM, encoding="utf-8")
    kept: list[tuple[bytes, BuildResult]] = []
    events: list[BuildEvent] = []

    def stage() -> Path:
        (tmp_path / "jöb").mkdir()
        return tmp_path / "jöb"

    def prepare(job_dir: Path, cancelled: Callable[[], bool]) -> None:
        (job_dir / "weights.safetensors").write_bytes(b"weights")

    def commit(out: Path, result: dict[str, Any], build_s: float) -> None:
        kept.append(((out / "engine.bin").read_bytes(), result_from_json(result)))

    queue = BuildQueue(events.append, markers=tmp_path / "markers")
    spec = JobSpec("openvino", PROFILE, BuildOptions("CPU"), {"fail": fail}).to_json()
    ticket = queue.submit(
        BuildJob(
            key_digest="ab" * 32,
            backend="openvino",
            label="tiny",
            spec=spec,
            prepare=prepare,
            command=(sys.executable, str(program), str(ROOT)),
            env={},
            stage=stage,
            commit=commit,
            timeout_s=120.0,
        )
    )
    state = queue.wait(ticket, lambda: None)
    queue.close()
    assert not (tmp_path / "jöb").exists()
    if fail:
        assert state.failure is not None
        assert state.failure.kind == "child-error"
        assert "LookupError: no such network" in state.failure.message
        assert "in make_module" in state.failure.traceback
    else:
        assert state.status == "done"
        assert kept == [(b"weights", BuildResult(PROFILE, (), (("threads", "1"),)))]
        assert ("capture", 0.525) in [(e.state.phase, e.state.fraction) for e in events]
