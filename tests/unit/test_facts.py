"""The probe on this very machine, and the parts of it that read texts of other machines."""

from __future__ import annotations

import builtins
import platform
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from kitchen_accel import backends
from kitchen_accel.backends.base import BACKEND_IDS, BackendId, GpuFacts, LibraryFacts, Refusal
from kitchen_accel.errors import BackendError
from kitchen_accel.scheduler import facts

ROOT_CODE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kitchen_accel", sys.argv[1], submodule_search_locations=[sys.argv[2]])
sys.modules["kitchen_accel"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kitchen_accel"])
import kitchen_accel.scheduler.facts, kitchen_accel.scheduler.decide, kitchen_accel.backends
loaded = [m for m in ("torch", "openvino", "tensorrt", "onnx", "onnxruntime") if m in sys.modules]
sys.exit(f"imported {loaded}" if loaded else 0)
"""


def test_probe_tells_of_this_machine() -> None:
    import torch

    found = facts.probe(("cuda",))

    assert found.platform == {"win32": "windows"}.get(sys.platform, sys.platform)
    assert found.python == platform.python_version()
    assert found.torch_version == torch.__version__
    assert found.cpu_name not in ("", "unknown")
    assert found.memory_bytes == psutil.virtual_memory().total
    assert 1 <= found.physical_cores <= (psutil.cpu_count() or 1)
    assert len([g for g in found.gpus if g.kind in ("nvidia", "amd")]) == torch.cuda.device_count()
    assert found.libraries == ()


@pytest.mark.skipif(not backends.implemented("openvino"), reason="backends/openvino.py is not there")
def test_probe_asks_the_openvino_that_is_installed() -> None:
    openvino = pytest.importorskip("openvino")

    found = facts.probe(("openvino",)).library("openvino")

    assert isinstance(found, LibraryFacts)
    assert found.version
    assert found.version.split("-")[0] in openvino.__version__
    assert "CPU" in found.devices


def test_a_library_is_probed_only_when_enabled_and_in_the_order_of_the_ids() -> None:
    found = facts.probe(("openvino", "cuda", "tensorrt"))

    assert [name for name, _ in found.libraries] == ["tensorrt", "openvino"]


@pytest.mark.parametrize("backend", [b for b in backends.ENGINE_IDS if not backends.implemented(b)])
def test_a_backend_without_a_file_says_so(backend: BackendId) -> None:
    found = facts.probe((backend,)).library(backend)

    assert isinstance(found, Refusal)
    assert found.code == "not-implemented"
    assert backend in found.text
    assert "not in this version" in found.text
    with pytest.raises(BackendError, match="not in this version"):
        backends.create(backend)


@pytest.mark.parametrize(
    "error",
    [
        ImportError("No module named 'openvino'"),
        OSError("libtbb.so.12: cannot open shared object file"),
        RuntimeError("general error of the plugin"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_a_library_that_breaks_keeps_its_error_and_gets_an_install_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(backend: BackendId) -> Any:
        raise error

    monkeypatch.setattr(backends, "implemented", lambda backend: True)
    monkeypatch.setattr(backends, "create", broken)

    found = facts.probe(("openvino",)).library("openvino")

    assert isinstance(found, Refusal)
    assert found.code == "missing-library"
    assert f"{type(error).__name__}: {error}" in found.text
    assert 'pip install "openvino>=2025.0"' in found.text


def test_engine_ids_are_the_backends_but_cuda_in_the_same_order() -> None:
    assert ("cuda", *backends.ENGINE_IDS) == BACKEND_IDS


@pytest.mark.parametrize("name", ["cuda", "vulkan"])
def test_create_names_what_it_knows(name: Any) -> None:
    with pytest.raises(BackendError) as caught:
        backends.create(name)

    assert name in str(caught.value)
    assert all(known in str(caught.value) for known in backends.ENGINE_IDS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Intel(R) Core(TM) i7-1185G7\n", "Intel(R) Core(TM) i7-1185G7"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("processor\t: 0\nBogoMIPS\t: 48.00\nModel\t\t: Raspberry Pi 5\n", ""),
        ("model name\t:\n", ""),
        ("", ""),
    ],
    ids=["x86", "power", "arm-without-a-name", "empty-name", "empty"],
)
def test_cpu_name_of_cpuinfo(text: str, name: str) -> None:
    assert facts.cpu_name_of_cpuinfo(text) == name


class _Cuda:
    """What `torch.cuda` answers on machines we do not have; an Exception in place of a card is raised."""

    def __init__(self, *cards: Any, available: bool = True) -> None:
        self.cards = cards
        self.available = available
        self.asked = 0

    def is_available(self) -> bool:
        self.asked += 1
        return self.available

    def device_count(self) -> int:
        return len(self.cards)

    def get_device_properties(self, index: int) -> Any:
        if isinstance(self.cards[index], Exception):
            raise self.cards[index]
        return self.cards[index]


def _card(name: str, major: int, minor: int) -> Any:
    return types.SimpleNamespace(name=name, major=major, minor=minor, total_memory=8 << 30)


def _torch(monkeypatch: pytest.MonkeyPatch, **parts: Any) -> None:
    torch = types.ModuleType("torch")
    defaults = {"__version__": "2.9.0", "version": types.SimpleNamespace(cuda=None, hip=None), "cuda": _Cuda()}
    for name, value in {**defaults, **parts}.items():
        setattr(torch, name, value)
    monkeypatch.setitem(sys.modules, "torch", torch)


def test_nvidia_gpus_keep_torchs_index_even_when_one_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(_card("RTX 3060", 8, 6), RuntimeError("card fell off the bus"), _card("RTX 5090", 12, 0))
    _torch(monkeypatch, version=types.SimpleNamespace(cuda="13.0", hip=None), cuda=cuda)

    gpus = facts.probe(()).gpus

    assert [(g.kind, g.compute_capability) for g in gpus] == [
        ("nvidia", (8, 6)),
        ("nvidia", (0, 0)),
        ("nvidia", (12, 0)),
    ]
    assert "card fell off the bus" in gpus[1].name
    assert gpus[0] == GpuFacts("RTX 3060", "nvidia", (8, 6), 8 << 30)


def test_rocm_cards_have_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, version=types.SimpleNamespace(cuda=None, hip="6.4"), cuda=_Cuda(_card("RX 7900", 11, 0)))

    assert facts.probe(()).gpus == (GpuFacts("RX 7900", "amd", (0, 0), 8 << 30),)


def test_a_torch_without_gpu_support_is_not_even_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = _Cuda(_card("RTX 3060", 8, 6))
    _torch(monkeypatch, cuda=cuda)

    assert facts.probe(()).gpus == ()
    assert cuda.asked == 0


def test_intel_gpus_come_from_torch_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, xpu=_Cuda(types.SimpleNamespace(name="Arc B580", total_memory=12 << 30)))

    assert facts.probe(()).gpus == (GpuFacts("Arc B580", "intel", (0, 0), 12 << 30),)


@pytest.mark.parametrize("part", ["cuda", "xpu"])
def test_a_driver_that_raises_leaves_no_gpu_and_no_error(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def is_available(self) -> bool:
            raise RuntimeError("CUDA driver initialization failed")

    _torch(monkeypatch, version=types.SimpleNamespace(cuda="13.0", hip=None), **{part: Broken()})

    assert facts.probe(()).gpus == ()


def _failing_import(names: tuple[str, ...], error: Exception) -> Callable[..., Any]:
    original = builtins.__import__

    def replacement(name: str, *args: Any, **kwargs: Any) -> Any:
        if name in names:
            raise error
        return original(name, *args, **kwargs)

    return replacement


def test_without_torch_and_psutil_the_rest_is_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__import__", _failing_import(("torch", "psutil"), OSError("broken library")))

    found = facts.probe(())

    assert found.torch_version == ""
    assert found.memory_bytes == 0
    assert found.physical_cores >= 1
    assert found.cpu_name
    assert found.gpus == ()


def test_importing_the_scheduler_imports_no_library(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath

    done = subprocess.run(
        [sys.executable, "-c", ROOT_CODE, str(root / "__init__.py"), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
