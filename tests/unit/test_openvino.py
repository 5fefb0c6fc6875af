"""The OpenVINO backend beyond the contract: options, devices, variants, blobs, and what happens when it is absent."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel.backends import openvino as room
from kitchen_accel.backends.base import BuildOptions, BuildResult, LibraryFacts, Precision, Refusal
from kitchen_accel.backends.openvino import BIN_FILE, BLOBS_FOLDER, XML_FILE, OpenVINOBackend, OpenVINOEngine
from kitchen_accel.capture.families import requested_profile
from kitchen_accel.capture.measure import measure, psnr_db, specs
from kitchen_accel.errors import BuildError, EngineError
from kitchen_accel.tests.networks import TinyUNet, filled, inputs_of

ov = pytest.importorskip("openvino")

ROOT = Path(__file__).resolve().parents[2]

inputs = inputs_of()
EXAMPLE = (2, 16, 12, 77)


class Fixture:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # wide enough that its weights outweigh a compiled network without them
        self.network = filled(TinyUNet(channels=256))
        example = inputs(EXAMPLE)
        self.result: BuildResult = OpenVINOBackend().build(
            self.network, example, requested_profile("unet", specs(example)), BuildOptions("CPU"), folder,
            lambda phase, fraction: None,
        )  # fmt: skip

        self.built_blobs = sorted((folder / BLOBS_FOLDER).iterdir())

    def load(self, precision: Precision = "fp32", folder: Path | None = None, **options: object) -> OpenVINOEngine:
        pairs = tuple(sorted((name, str(value)) for name, value in options.items()))
        return OpenVINOBackend().load(folder or self.folder, self.result.profile, precision, BuildOptions("CPU", pairs))

    def eager(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.network(**given)
        return out

    @property
    def blobs(self) -> dict[str, tuple[int, int]]:
        """Name -> size and time of change."""
        found = {p.name: p.stat() for p in (self.folder / BLOBS_FOLDER).iterdir()}
        return {name: (s.st_size, s.st_mtime_ns) for name, s in found.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Fixture:
    return Fixture(tmp_path_factory.mktemp("engine"))


@pytest.fixture
def copy(made: Fixture, tmp_path: Path) -> Path:
    """A folder with the engine's files and no blobs."""
    for name in (XML_FILE, BIN_FILE):
        (tmp_path / name).write_bytes((made.folder / name).read_bytes())
    return tmp_path


# -- the library --------------------------------------------------------------------------------------------------


def test_probe_reports_what_the_cpu_computes_in() -> None:
    facts = OpenVINOBackend().probe()
    assert isinstance(facts, LibraryFacts)
    assert ov.get_version().startswith(facts.version)
    assert "CPU" in facts.devices
    words = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert set(dict(facts.precisions)["CPU"]) == {w.lower() for w in words} & {"fp32", "bf16", "fp16"}


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        ("ImportError('no such module here')", "ImportError: no such module here"),
        ("OSError('libtbb.so.12: cannot open')", "OSError: libtbb.so.12: cannot open"),
        ("RuntimeError('wrong build')", "RuntimeError: wrong build"),
    ],
)
def test_a_library_that_does_not_load_is_a_refusal_with_its_error(tmp_path: Path, raised: str, words: str) -> None:
    (tmp_path / "openvino.py").write_text(f"raise {raised}", encoding="utf-8")
    code = (
        "import sys; sys.path.insert(0, 'tests'); import conftest; sys.path.insert(0, sys.argv[1]);"
        "from kitchen_accel.backends import create; print(create('openvino').probe().text)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert words in done.stdout
    assert "pip install openvino" in done.stdout


def test_the_library_comes_without_its_usage_statistics() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); import conftest;"
        "from kitchen_accel.backends import create; print(create('openvino').probe().version);"
        "import openvino.tools.ovc.telemetry_utils as t; print(t.tm.__name__);"
        "assert 'openvino_telemetry' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "openvino.tools.ovc.telemetry_stub"


# -- options and devices ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"shapes": "both"}, {"max_compiled": 0}, {"max_compiled": "many"}, {"threads": -1}, {"streams": 2}],
    ids=str,
)
def test_bad_options_are_refused_by_name(made: Fixture, options: dict[str, object]) -> None:
    with pytest.raises(EngineError, match=next(iter(options))):
        made.load("fp32", None, **options)


@pytest.mark.parametrize("device", ["AUTO", "AUTO:CPU", "HETERO:CPU", "MULTI:CPU", "BATCH:CPU", "cpu", "", "GPU.x"])
def test_only_one_real_device_is_accepted(made: Fixture, tmp_path: Path, device: str) -> None:
    backend = OpenVINOBackend()
    with pytest.raises(EngineError, match=r"CPU, GPU, NPU"):
        backend.load(made.folder, made.result.profile, "fp32", BuildOptions(device))
    with pytest.raises(BuildError, match=r"CPU, GPU, NPU"):
        backend.build(made.network, inputs(EXAMPLE), made.result.profile, BuildOptions(device), tmp_path, print)


def test_a_device_without_a_driver_is_refused_when_it_is_used(made: Fixture) -> None:
    missing = next(d for d in ("GPU.7", "NPU") if d not in ov.Core().available_devices)
    with (
        closing(OpenVINOBackend().load(made.folder, made.result.profile, "fp16", BuildOptions(missing))) as engine,
        pytest.raises(EngineError, match=missing),
    ):
        engine.prepare(specs(inputs(EXAMPLE)))


def test_a_precision_the_cpu_replaces_is_refused(made: Fixture) -> None:
    native = OpenVINOBackend().probe()
    assert isinstance(native, LibraryFacts)
    lacking = [p for p in ("bf16", "fp16") if p not in dict(native.precisions)["CPU"]]
    if not lacking:
        pytest.skip("this CPU computes in every precision")
    with closing(made.load(lacking[0])) as engine, pytest.raises(EngineError, match=r"OpenVINO computes in"):  # type: ignore[arg-type]
        engine.prepare(specs(inputs(EXAMPLE)))


def test_each_native_precision_is_what_the_runtime_says(made: Fixture) -> None:
    native = OpenVINOBackend().probe()
    assert isinstance(native, LibraryFacts)
    found = {m.precision for m in made.result.measurements}
    assert found == set(dict(native.precisions)["CPU"])
    for precision in found:
        with closing(made.load(precision)) as engine:
            out = engine.run(inputs(EXAMPLE))
            assert (engine.precision, engine.device) == (precision, "CPU")
            figure = psnr_db(out, made.eager(inputs(EXAMPLE)))
        assert figure > (100 if precision == "fp32" else 25)
        # fp32 that is secretly something else would be no better than that
        assert (figure > 100) == (precision == "fp32")


def test_threads_reach_the_runtime(made: Fixture) -> None:
    with closing(made.load(threads=1)) as engine:
        engine.run(inputs(EXAMPLE))
        (compiled,) = engine._static.values()
        assert compiled._request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == 1


# -- variants -----------------------------------------------------------------------------------------------------


def test_compiled_networks_are_bounded_and_counted(made: Fixture) -> None:
    weights = (made.folder / BIN_FILE).stat().st_size
    sizes = [(1, 8 + n, 9, 7) for n in range(6)]
    with closing(made.load(max_compiled=2)) as engine:
        held = []
        for size in sizes * 2:
            given = inputs(size)
            assert psnr_db(engine.run(given), made.eager(given)) > 100
            held.append(engine.device_bytes // weights)
        assert held == [1, 2] + [3] * 10
        assert len(engine._static) == 2


@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_forced_variants_agree_with_the_network(made: Fixture, shapes: str) -> None:
    with closing(made.load(shapes=shapes, max_compiled=1)) as engine:
        for size in (EXAMPLE, (1, 13, 9, 5), EXAMPLE):
            given = inputs(size)
            assert psnr_db(engine.run(given), made.eager(given)) > 100
        assert len(engine._static) == (shapes == "static")
        assert (engine._dynamic is None) == (shapes == "static")


def test_the_least_and_an_odd_size_at_the_edge_of_the_profile(made: Fixture) -> None:
    with closing(made.load(shapes="dynamic")) as engine:
        for size in ((1, 3, 3, 1), (64, 3, 5, 1)):
            given = inputs(size)
            assert psnr_db(engine.run(given), made.eager(given)) > 100


# -- blobs --------------------------------------------------------------------------------------------------------


def test_blobs_hold_no_weights(made: Fixture) -> None:
    weight = made.network.get_parameter("leave.weight").detach().numpy().tobytes()[:256]
    assert weight in (made.folder / BIN_FILE).read_bytes()
    # static and dynamic, in each native precision
    assert len(made.built_blobs) == len(made.result.measurements)
    for blob in made.built_blobs:
        assert weight not in blob.read_bytes()
        assert blob.stat().st_size < (made.folder / BIN_FILE).stat().st_size / 4


def test_what_the_build_compiled_is_not_compiled_again(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    before = made.blobs

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    for shapes in ("static", "dynamic"):
        with closing(made.load(shapes=shapes)) as engine:
            monkeypatch.setattr(engine._core, "compile_model", refuse)
            assert psnr_db(engine.run(inputs(EXAMPLE)), made.eager(inputs(EXAMPLE))) > 100
    assert made.blobs == before


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_blob_is_made_anew(made: Fixture, copy: Path, damage: str) -> None:
    given = inputs(EXAMPLE)
    with closing(made.load(folder=copy)) as engine:
        want = engine.run(given)
    (blob,) = (copy / BLOBS_FOLDER).iterdir()
    good = blob.read_bytes()
    middle = len(good) // 2
    bad = {"truncate": good[:middle], "flip": good[:middle] + b"\x55" * 64 + good[middle + 64 :], "empty": b""}[damage]
    blob.write_bytes(bad)
    with closing(made.load(folder=copy)) as engine:
        assert torch.equal(engine.run(given), want)
    assert len(blob.read_bytes()) == pytest.approx(len(good), rel=0.1)
    assert blob.read_bytes() != bad
    assert [p.name for p in (copy / BLOBS_FOLDER).iterdir()] == [blob.name]


def test_a_blob_openvino_cannot_read_is_made_anew(made: Fixture, copy: Path) -> None:
    given = inputs(EXAMPLE)
    with closing(made.load(folder=copy)) as engine:
        want = engine.run(given)
    (blob,) = (copy / BLOBS_FOLDER).iterdir()
    junk = b"junk" * 1000
    blob.write_bytes(hashlib.sha256(junk).digest() + junk)
    with closing(made.load(folder=copy)) as engine:
        assert torch.equal(engine.run(given), want)
    assert junk not in blob.read_bytes()


def test_a_blob_of_another_size_or_precision_is_another_file(made: Fixture, copy: Path) -> None:
    for precision in {m.precision for m in made.result.measurements}:
        for size in (EXAMPLE, (1, 13, 9, 5)):
            with closing(made.load(precision, folder=copy)) as engine:
                engine.run(inputs(size))
    wanted = 2 * len({m.precision for m in made.result.measurements})
    assert len(list((copy / BLOBS_FOLDER).iterdir())) == wanted


def test_a_folder_that_takes_no_blobs_costs_only_the_blobs(made: Fixture, copy: Path) -> None:
    (copy / BLOBS_FOLDER).write_text("a file where the folder would be", encoding="utf-8")
    with closing(made.load(folder=copy)) as engine:
        assert psnr_db(engine.run(inputs(EXAMPLE)), made.eager(inputs(EXAMPLE))) > 100


def test_blobs_on_disk_are_bounded(made: Fixture, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "BLOBS_KEPT", 2)
    with closing(made.load(folder=copy, shapes="static")) as engine:
        for height in (8, 9, 10, 11):
            engine.run(inputs((1, height, 8, 7)))
    assert len(list((copy / BLOBS_FOLDER).iterdir())) == 2


# -- files --------------------------------------------------------------------------------------------------------


def test_another_networks_file_is_refused(made: Fixture, copy: Path) -> None:
    parameter = ov.opset13.parameter([-1, 4], ov.Type.f32)
    model = ov.Model([ov.opset13.relu(parameter)], [parameter])
    ov.save_model(model, copy / XML_FILE)
    with pytest.raises(EngineError, match=r"another network.*x, timesteps, context"):
        made.load(folder=copy)


def test_weights_are_saved_in_full(made: Fixture) -> None:
    parameters = sum(p.numel() for p in made.network.parameters())
    assert (made.folder / BIN_FILE).stat().st_size >= 4 * parameters


# -- measuring ----------------------------------------------------------------------------------------------------


class Wrong(torch.nn.Module):
    """What the engine was built from, times something."""

    def __init__(self, network: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.network, self.factor = network, factor

    def forward(self, **given: Any) -> torch.Tensor:
        out: torch.Tensor = self.network(**given) * self.factor
        return out


@pytest.mark.parametrize(("factor", "words"), [(1.01, r"\d+\.\d dB PSNR"), (float("nan"), "not finite")])
def test_an_engine_that_differs_from_the_network_fails_its_build(made: Fixture, factor: float, words: str) -> None:
    with pytest.raises(BuildError, match=words):
        measure(
            Wrong(made.network, factor), lambda precision, variant: made.load(precision), (("fp32", "static"),),
            inputs(EXAMPLE), made.result.profile, lambda done: None,
        )  # fmt: skip


def test_a_call_the_capture_does_not_cover_is_measured_nearby(made: Fixture) -> None:
    found, notes = measure(
        made.network, lambda precision, variant: made.load(precision), (("fp32", "static"),),
        inputs((1, 1, 16, 7)), made.result.profile, lambda done: None,
    )  # fmt: skip
    assert found[0].psnr_db > 100
    assert "compile_fp32_static_s" in notes


# -- types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fixed", [True, False], ids=["static", "dynamic"])
def test_every_float_type_passes_unchanged(dtype: torch.dtype, fixed: bool) -> None:
    kind = {torch.float32: ov.Type.f32, torch.float16: ov.Type.f16, torch.bfloat16: ov.Type.bf16}[dtype]
    parameter = ov.opset13.parameter([2, 8] if fixed else [-1, 8], kind)
    parameter.output(0).get_tensor().set_names({"x"})
    model = ov.Model([ov.opset13.relu(parameter)], [parameter])
    compiled = room._Compiled(ov, ov.Core().compile_model(model, "CPU"), ("x",))
    given = torch.linspace(-3, 3, 16).reshape(2, 8).to(dtype)
    first = compiled.infer({"x": given})
    second = compiled.infer({"x": given + 1})
    assert first.dtype == dtype
    assert torch.equal(first, given.relu())
    assert torch.equal(second, (given + 1).relu())


def test_contiguous_inputs_are_not_copied() -> None:
    given = torch.randn(2, 3, 4)
    assert room._shared(ov, given).data.ctypes.data == given.data_ptr()
    half = given.to(torch.bfloat16)
    assert room._shared(ov, half).data.ctypes.data == half.data_ptr()


def test_a_refusal_has_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise ImportError("DLL load failed while importing _pyopenvino")

    monkeypatch.setattr(room, "_library", fail)
    found = OpenVINOBackend().probe()
    assert isinstance(found, Refusal)
    assert "DLL load failed" in found.text
    assert found.hint == "pip install openvino"
