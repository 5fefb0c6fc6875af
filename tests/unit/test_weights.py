"""What of the weights' bookkeeping needs no ComfyUI: configurations as JSON, and the digest of the source code."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel.host.model import decode_config, encode_config, runs_wrappers
from kitchen_accel.host.weights import code_digest


def test_plain_data_survives_json() -> None:
    config = {
        "in_channels": 4, "channel_mult": (1, 2, 4), "dtype": torch.bfloat16, "qk_norm": "rms", "scale": 0.5,
        "adm_in_channels": None, "use_linear": True, "embedder": {"target": "torch.nn.Linear", "params": {"a": [1]}},
    }  # fmt: skip
    found = decode_config(json.loads(json.dumps(encode_config(config))))
    assert found == {**config, "channel_mult": [1, 2, 4]}


@pytest.mark.parametrize("value", [object(), torch.ones(1), {1, 2}, print, b"x", 1j], ids=lambda v: type(v).__name__)
def test_what_is_not_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=type(value).__name__):
        encode_config({"a": [value]})


@pytest.mark.parametrize("name", ["no_such_dtype", "Tensor", "__builtins__", "load", 5])
def test_a_dtype_from_a_file_can_only_be_a_dtype(name: Any) -> None:
    with pytest.raises(TypeError, match="unknown dtype"):
        decode_config({"dtype": {"$dtype": name}})


def load_copy(monkeypatch: pytest.MonkeyPatch, folder: Path, source: bytes) -> Any:
    """A network whose class lies in a module of the `comfy` package with this source."""
    file = folder / "kitchen_probe.py"
    file.write_bytes(source)
    module = types.ModuleType("comfy.kitchen_probe")
    module.__file__ = str(file)
    exec(compile(source, str(file), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "comfy.kitchen_probe", module)
    return module.Net()


SOURCE = b"""
import torch

class Block(torch.nn.Module):
    def forward(self, x):
        return x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
"""


def test_a_changed_source_file_changes_the_code_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = code_digest(load_copy(monkeypatch, tmp_path, SOURCE))
    assert first == code_digest(load_copy(monkeypatch, tmp_path, SOURCE))
    assert first != code_digest(load_copy(monkeypatch, tmp_path, SOURCE.replace(b"return x", b"return +x")))
    assert first != code_digest(torch.nn.Linear(1, 1)), "PyTorch's own modules are not ComfyUI's code"


def test_a_submodules_source_counts_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Outer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner = inner

    first = code_digest(Outer(load_copy(monkeypatch, tmp_path, SOURCE)))
    assert first != code_digest(Outer(load_copy(monkeypatch, tmp_path, SOURCE + b"# later\n")))


def test_whether_a_class_runs_wrappers_is_read_from_its_code() -> None:
    class Has(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return WrappersMP.DIFFUSION_MODEL  # type: ignore[name-defined] # noqa: F821

    class HasNot(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return "DIFFUSION_MODEL"

    assert runs_wrappers(Has)
    assert not runs_wrappers(HasNot)
