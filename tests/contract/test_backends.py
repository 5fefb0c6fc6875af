"""One suite over every engine backend. A new backend joins by its line in `backends.ENGINE_PATHS`.

Each backend builds three networks once: one of our own, and ComfyUI's UNet and MMDiT where COMFYUI_PATH is set.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel import backends
from kitchen_accel.backends.base import (
    Backend,
    BackendId,
    BuildOptions,
    BuildResult,
    DimRange,
    Engine,
    LibraryFacts,
    Measurement,
    Refusal,
)
from kitchen_accel.capture.families import family_of, requested_profile
from kitchen_accel.capture.measure import psnr_db, specs
from kitchen_accel.errors import EngineError
from kitchen_accel.tests.networks import ComfyNetworks, Sizes, class_name, inputs_of, tiny

Inputs = dict[str, torch.Tensor]

DEVICES: dict[BackendId, str] = {"openvino": "CPU"}
"""`BuildOptions.device` for the tests; nothing for a backend without such a setting."""

LEAST_DB = 60.0
"""In fp32, whatever the size: the YAML's own threshold."""


@functools.cache
def comfy_networks(tree: str) -> ComfyNetworks:
    return ComfyNetworks(Path(tree))


def comfy(kind: str) -> torch.nn.Module:
    tree = os.environ.get("COMFYUI_PATH")
    if not tree:
        pytest.skip("COMFYUI_PATH names no ComfyUI whose networks could be built")
    network: torch.nn.Module = getattr(comfy_networks(tree), kind)()
    return network


@dataclass(frozen=True)
class Case:
    """A network, its inputs, and sizes (batch, height, width, tokens) it is tried at; the first is built for."""

    network: Callable[[], torch.nn.Module]
    inputs: Callable[[Sizes], Inputs]
    sizes: tuple[Sizes, ...]
    family: str = "unet"


CASES = {
    "tiny": Case(
        tiny, inputs_of(), ((2, 16, 16, 77), (1, 13, 9, 77), (3, 21, 12, 154), (1, 32, 32, 1), (5, 3, 40, 231))
    ),
    "comfyui-unet": Case(
        lambda: comfy("unet"), inputs_of(), ((2, 16, 16, 77), (1, 13, 9, 77), (3, 20, 11, 154), (1, 33, 8, 231))
    ),
    "comfyui-mmdit": Case(
        lambda: comfy("mmdit"),
        inputs_of(16, y=True),
        ((2, 16, 16, 77), (1, 14, 10, 77), (3, 20, 12, 154), (1, 32, 8, 333)),
        "mmdit",
    ),
}


@dataclass(frozen=True)
class Built:
    backend: Backend
    case: Case
    network: torch.nn.Module
    folder: Path
    result: BuildResult
    progress: tuple[tuple[str, float], ...]

    def load(self, folder: Path | None = None) -> Engine:
        options = BuildOptions(DEVICES.get(self.backend.id, ""))
        return self.backend.load(folder or self.folder, self.result.profile, "fp32", options)

    def eager(self, inputs: Inputs) -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = self.network(**inputs)
        return out


@pytest.fixture(scope="module", params=[name for name in backends.ENGINE_IDS if backends.implemented(name)])
def backend(request: pytest.FixtureRequest) -> Backend:
    made = backends.create(request.param)
    facts = made.probe()
    if isinstance(facts, Refusal):
        pytest.skip(facts.text)
    return made


@pytest.fixture(scope="module", params=CASES)
def built(backend: Backend, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case = CASES[request.param]
    network = case.network()
    if request.param != "tiny":
        assert family_of(class_name(network)) == case.family
    example = case.inputs(case.sizes[0])
    folder = tmp_path_factory.mktemp("engine with späce")
    seen: list[tuple[str, float]] = []
    result = backend.build(
        network,
        example,
        requested_profile(case.family, specs(example)),
        BuildOptions(DEVICES.get(backend.id, "")),
        folder,
        lambda phase, fraction: seen.append((phase, fraction)),
    )
    return Built(backend, case, network, folder, result, tuple(seen))


@pytest.fixture
def engine(built: Built) -> Iterator[Engine]:
    with closing(built.load()) as made:
        yield made


def test_probe_tells_version_and_devices(backend: Backend) -> None:
    facts = backend.probe()
    assert isinstance(facts, LibraryFacts)
    assert facts.version[0].isdigit()
    assert {device for device, _ in facts.precisions} <= set(facts.devices)


def test_build_reports_what_it_measured(built: Built) -> None:
    fp32 = [m for m in built.result.measurements if m.precision == "fp32"]
    assert fp32
    for found in built.result.measurements:
        assert isinstance(found, Measurement)
        assert found.step_s > 0
        assert found.torch_step_s > 0
        assert found.psnr_db >= (LEAST_DB if found.precision == "fp32" else 20.0)


def test_build_reports_progress_that_never_falls(built: Built) -> None:
    fractions = [fraction for _, fraction in built.progress]
    assert len({phase for phase, _ in built.progress}) > 1
    assert fractions == sorted(fractions)
    assert fractions[0] >= 0.0
    assert fractions[-1] <= 1.0


def test_build_leaves_the_network_as_it_was(built: Built) -> None:
    fresh = built.case.network()
    assert type(fresh) is type(built.network)
    assert not built.network.training
    for (name, before), (other, after) in zip(
        fresh.state_dict().items(), built.network.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(before, after)
    assert not any(module._forward_hooks for module in built.network.modules())


def test_file_names_stay_short(built: Built) -> None:
    assert all(len(p.relative_to(built.folder).as_posix()) < 50 for p in built.folder.rglob("*"))


def test_parity_at_every_size(built: Built, engine: Engine) -> None:
    # twice round: with what was made for one size, another size must still be right
    for sizes in (*built.case.sizes, *built.case.sizes):
        inputs = built.case.inputs(sizes)
        engine.prepare(specs(inputs))
        out, want = engine.run(inputs), built.eager(inputs)
        assert out.shape == want.shape
        assert out.dtype == want.dtype
        assert out.device == inputs["x"].device
        assert psnr_db(out, want) >= LEAST_DB, sizes


def test_run_without_prepare(built: Built, engine: Engine) -> None:
    inputs = built.case.inputs(built.case.sizes[1])
    assert psnr_db(engine.run(inputs), built.eager(inputs)) >= LEAST_DB


def test_device_and_precision_come_from_the_runtime(built: Built, engine: Engine) -> None:
    engine.prepare(specs(built.case.inputs(built.case.sizes[0])))
    assert engine.precision == "fp32"
    assert engine.device
    assert engine.device_bytes > 0


@pytest.mark.parametrize("index", [0, -1], ids=["first size", "last size"])
def test_a_result_outlives_later_calls(built: Built, engine: Engine, index: int) -> None:
    for sizes in built.case.sizes:  # so that the last size is served by whatever serves many sizes
        engine.run(built.case.inputs(sizes))
    inputs = built.case.inputs(built.case.sizes[index])
    first = engine.run(inputs)
    kept = first.clone()
    other = {name: tensor * 0.5 for name, tensor in inputs.items()}
    second = engine.run(other)
    assert not torch.equal(second, kept)
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(engine.run(inputs), kept)
    assert psnr_db(second, built.eager(other)) >= LEAST_DB


def test_a_result_outlives_its_engine(built: Built) -> None:
    inputs = built.case.inputs(built.case.sizes[0])
    with closing(built.load()) as engine:
        out = engine.run(inputs)
        kept = out.clone()
    del engine
    assert torch.equal(out, kept)


def test_inputs_are_not_changed(built: Built, engine: Engine) -> None:
    for sizes in built.case.sizes:
        inputs = built.case.inputs(sizes)
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        engine.run(inputs)
        assert all(torch.equal(tensor, before[name]) for name, tensor in inputs.items())


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _sliced(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full_like(tensor, 7.0), tensor])[len(tensor) :]


def _unusual_strides_of_one(tensor: torch.Tensor) -> torch.Tensor:
    one = tensor[:1]
    return torch.as_strided(one, one.shape, (12345, *one.stride()[1:]))


@pytest.mark.parametrize("layout", [_transposed, _strided, _channels_last, _sliced, _unusual_strides_of_one])
def test_any_memory_layout(built: Built, engine: Engine, layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    plain = built.case.inputs(built.case.sizes[0])
    given = {n: layout(t) if t.ndim > 1 or layout not in (_transposed,) else t for n, t in plain.items()}
    assert psnr_db(engine.run(given), built.eager(given)) >= LEAST_DB


def test_one_row_for_all(built: Built, engine: Engine) -> None:
    plain = built.case.inputs(built.case.sizes[0])
    given = plain | {"context": plain["context"][:1].expand_as(plain["context"])}
    assert psnr_db(engine.run(given), built.eager(given)) >= LEAST_DB


def test_other_dtypes_are_converted_at_the_boundary(built: Built, engine: Engine) -> None:
    plain = built.case.inputs(built.case.sizes[0])
    for dtype, least in ((torch.float16, 50.0), (torch.bfloat16, 30.0), (torch.float64, LEAST_DB)):
        out = engine.run({name: tensor.to(dtype) for name, tensor in plain.items()})
        assert out.dtype == dtype
        assert psnr_db(out, built.eager(plain)) >= least, dtype


def test_gradients_do_not_enter(built: Built, engine: Engine) -> None:
    inputs = {name: t.requires_grad_() for name, t in built.case.inputs(built.case.sizes[0]).items()}
    assert not engine.run(inputs).requires_grad


def test_calls_count_completed_runs(built: Built, engine: Engine) -> None:
    inputs = built.case.inputs(built.case.sizes[0])
    engine.prepare(specs(inputs))
    assert engine.calls == 0
    for done in (1, 2, 3):
        engine.run(inputs)
        assert engine.calls == done
    with pytest.raises(EngineError):
        engine.run({"x": inputs["x"]})
    assert engine.calls == 3


def test_outside_the_profile_names_input_value_and_range(built: Built, engine: Engine) -> None:
    good = built.case.inputs(built.case.sizes[0])
    dims = {i.name: i.dims for i in built.result.profile.inputs}
    for axis, dim in enumerate(dims["x"]):
        if not isinstance(dim, DimRange) or dim.name == "batch" or dim.min == 1:
            continue
        shape = list(good["x"].shape)
        shape[axis] = dim.min - dim.multiple
        with pytest.raises(EngineError, match=rf"input x.*{dim.name}.*{shape[axis]}.*{dim.min} to {dim.max}"):
            engine.run(good | {"x": torch.zeros(shape)})
    with pytest.raises(EngineError, match=r"input context.*49.*48"):
        engine.prepare(specs(good | {"context": torch.zeros(2, 77, 49)}))
    with pytest.raises(EngineError, match="input extra"):
        engine.run(good | {"extra": torch.zeros(1)})
    with pytest.raises(EngineError, match="input context: absent"):
        engine.run({name: tensor for name, tensor in good.items() if name != "context"})
    # and it still works
    assert psnr_db(engine.run(good), built.eager(good)) >= LEAST_DB


def test_batches_that_do_not_agree_raise(built: Built, engine: Engine) -> None:
    good = built.case.inputs(built.case.sizes[0])
    for _ in range(2):
        with pytest.raises(EngineError, match="batch"):
            engine.run(good | {"timesteps": torch.zeros(len(good["x"]) + 1)})


def test_a_closed_engine_raises(built: Built) -> None:
    inputs = built.case.inputs(built.case.sizes[0])
    engine = built.load()
    engine.run(inputs)
    engine.close()
    engine.close()
    assert engine.device_bytes == 0
    for use in (lambda: engine.run(inputs), lambda: engine.prepare(specs(inputs))):
        with pytest.raises(EngineError, match="closed"):
            use()


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _zero(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [_truncate, _zero, Path.unlink])
def test_damaged_files_raise_engine_error(built: Built, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    files = sorted(p.name for p in built.folder.iterdir() if p.is_file())
    assert files
    inputs = built.case.inputs(built.case.sizes[0])
    for name in files:
        folder = tmp_path / name
        folder.mkdir()
        for other in files:
            shutil.copyfile(built.folder / other, folder / other)
        damage(folder / name)
        with pytest.raises(EngineError):
            built.load(folder).run(inputs)


def test_a_moved_engine_runs(built: Built, tmp_path: Path) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(built.folder, folder)
    inputs = built.case.inputs(built.case.sizes[0])
    with closing(built.load(folder)) as engine:
        assert psnr_db(engine.run(inputs), built.eager(inputs)) >= LEAST_DB


def test_two_threads_with_an_engine_each(built: Built) -> None:
    sizes = built.case.sizes[:2]
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def work(mine: Sizes) -> None:
        try:
            inputs = built.case.inputs(mine)
            want = built.eager(inputs)
            with closing(built.load()) as engine:
                start.wait(60)
                for _ in range(5):
                    assert psnr_db(engine.run(inputs), want) >= LEAST_DB
        except BaseException as error:
            failures.append(error)
            start.abort()

    threads = [threading.Thread(target=work, args=(mine,)) for mine in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
