"""ComfyUI's real classes in this process: small networks with random weights, real patchers, real sampling.

Nothing here starts a server. `COMFYUI_PATH` names the ComfyUI tree, which goes to the *end* of `sys.path`, since its
top-level folders have names (`tests`, `utils`, `app`) that must not hide anybody else's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kitchen_accel.backends.base import Call, Decision, Precision
from kitchen_accel.host.binding import accelerate
from kitchen_accel.host.model import ModelBinding, Source
from kitchen_accel.host.weights import DigestWorker, Fingerprints
from kitchen_accel.scheduler.dispatch import Dispatcher
from kitchen_accel.scheduler.engines import Lease
from kitchen_accel.scheduler.figures import Record, Records

DIGEST = "0" * 64
"""What the tests' model memory answers, so that no digest is computed beside the sampling."""

CONTEXT = 32
"""Width of the text embedding of both small networks."""

Cond = list[list[Any]]


def require_comfy() -> Path:
    """Make `comfy` importable, on the CPU. Skips the calling module where there is no ComfyUI."""
    value = os.environ.get("COMFYUI_PATH")
    if not value:
        pytest.skip("COMFYUI_PATH names no ComfyUI; `python dev.py test` sets it", allow_module_level=True)
    root = Path(value).resolve()
    if str(root) not in sys.path:
        sys.path.append(str(root))
    from comfy.cli_args import args

    args.cpu = True
    import comfy.model_management

    if comfy.model_management.get_torch_device().type != "cpu":
        pytest.skip("another test imported ComfyUI for a GPU", allow_module_level=True)
    return root


def _fill(module: torch.nn.Module, seed: int) -> None:
    """Random weights small enough that every layer's output stays near 1: ComfyUI leaves them uninitialised."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.state_dict().values():
        fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 4
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)


def _patcher(model: Any) -> Any:
    import comfy.model_patcher

    # a name only newer ComfyUI have: the patcher its own loaders use
    cls = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    return cls(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def make_sd15(seed: int = 1, dtype: torch.dtype = torch.float32, *, levels: int = 2) -> Any:
    """A patcher of ComfyUI's SD1.5 model with its real UNet, 32 channels wide (1 M parameters with two levels).

    dtype: of the weights; when it is not float32 the model computes in float32, as ComfyUI has it on a CPU.
    levels: 2, or 1 for a network that is fast to trace.
    """
    import comfy.supported_models

    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1] * levels,
        "channel_mult": [1, 2][:levels], "transformer_depth": [1, 1] if levels == 2 else [0],
        "transformer_depth_output": [1, 1, 1, 1] if levels == 2 else [0, 0],
        "transformer_depth_middle": 1 if levels == 2 else -1,
        "context_dim": CONTEXT, "num_heads": 4, "use_spatial_transformer": True, "use_linear_in_transformer": False,
        "adm_in_channels": None, "dtype": dtype,
    }  # fmt: skip
    settings = comfy.supported_models.SD15(config)
    if dtype != torch.float32:
        settings.manual_cast_dtype = torch.float32
    model = settings.get_model({}, "")
    _fill(model.diffusion_model, seed)
    return _patcher(model)


def make_sd3(seed: int = 2, *, blocks: int = 2) -> Any:
    """A patcher of ComfyUI's SD3 model with its real MMDiT, 64 wide."""
    import comfy.supported_models

    config = {
        "image_model": "sd3", "input_size": None, "patch_size": 2, "in_channels": 16, "depth": 1, "num_blocks": blocks,
        "adm_in_channels": 16, "pos_embed_max_size": 32, "num_patches": 1024, "pos_embed_scaling_factor": None,
        "context_embedder_config": {
            "target": "torch.nn.Linear", "params": {"in_features": CONTEXT, "out_features": 64},
        },
        "dtype": torch.float32,
    }  # fmt: skip
    del config["image_model"]  # detection's mark, which the class does not take
    model = comfy.supported_models.SD3(config).get_model({}, "")
    _fill(model.diffusion_model, seed)
    return _patcher(model)


def cond(seed: int, *, tokens: int = 77, pooled: int = 0, **extra: Any) -> Cond:
    """Conditioning as ComfyUI's text encoder nodes give it: `[[tensor (1, tokens, CONTEXT), {...}]]`."""
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = dict(extra)
    if pooled:
        fields["pooled_output"] = torch.randn(1, pooled, generator=generator)
    return [[torch.randn(1, tokens, CONTEXT, generator=generator), fields]]


def sample(
    patcher: Any, *, shape: tuple[int, ...] = (1, 4, 8, 8), steps: int = 2, cfg: float = 7.0,
    positive: Cond | None = None, negative: Cond | None = None, seed: int = 3,
) -> torch.Tensor:  # fmt: skip
    """What the KSampler node does with an empty latent of `shape`, with the Euler sampler. Returns the latent."""
    import comfy.sample

    pooled = 16 if shape[1] == 16 else 0
    latent = torch.zeros(shape)
    output: torch.Tensor = comfy.sample.sample(
        patcher, comfy.sample.prepare_noise(latent, seed), steps, cfg, "euler", "normal",
        positive if positive is not None else cond(10, pooled=pooled),
        negative if negative is not None else cond(11, pooled=pooled),
        latent, denoise=1.0, disable_pbar=True, seed=seed,
    )  # fmt: skip
    return output


class RecordingEngine:
    """Computes what an exact engine would: the network's own class `forward` on the plain tensors.

    seen: the inputs of every call. error: raised instead, when set. watch: called first in every call.
    """

    device = "CPU"
    precision: Precision = "fp32"
    device_bytes = 0

    def __init__(self, network: Any) -> None:
        self.network = network
        self.calls = 0
        self.seen: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.watch: Callable[[], None] = lambda: None

    def prepare(self, tensors: Any) -> None:
        pass

    def run(self, inputs: Mapping[str, Any]) -> Any:
        self.watch()
        self.seen.append({name: value.clone() for name, value in inputs.items()})
        if self.error is not None:
            raise self.error
        self.calls += 1
        network = self.network()
        return type(network).forward(network, **inputs)

    def close(self) -> None:
        pass


class _Strict:
    """A journal that lets nothing be swallowed: the dispatcher notes its own faults as `error` and goes on."""

    def event(self, kind: str, message: str, **fields: Any) -> None:
        assert kind != "error", message


class _NoHost:
    interrupts: tuple[type[BaseException], ...] = ()


class FakeShelf:
    """In the place of the shelf of engines: the engine serves exactly the calls without blockers and control.

    calls: every Call that was decided on, in order.
    """

    fallback_forbidden = False
    journal, host = _Strict(), _NoHost()

    def __init__(self, engine: RecordingEngine) -> None:
        self.engine = engine
        self.calls: list[Call] = []
        self.released = 0
        self.suspended: list[str] = []

    def decide(self, model: Any, call: Call, inputs: Any, wanted: str) -> tuple[Decision, Call]:
        self.calls.append(call)
        if call.blockers or call.control:
            return Decision("cuda", "blocked", wanted, rejected=(("openvino", call.blockers),)), call
        return Decision("openvino", "plain", wanted, "digest", "fp32"), call

    def lease(self, decision: Decision, call: Call) -> Lease:
        return Lease(("digest",), self.engine)

    def proven(self, decision: Decision, call: Call) -> bool:
        return True

    def offer(self, call: Call, decision: Decision) -> str:
        return ""

    def suspend(self, decision: Decision, reason: str) -> None:
        self.suspended.append(reason)

    def announce(self, label: str, call: Call, decision: Decision) -> None:
        pass

    def release(self, lease: Lease) -> None:
        self.released += 1


class Rig:
    """One small model, its dispatcher over the fake shelf, and what reached the engine.

    base: the untouched patcher. `model()` makes an accelerated clone.
    """

    def __init__(self, base: Any) -> None:
        import weakref

        self.base = base
        self.network = weakref.ref(base.model.diffusion_model)
        self.engine = RecordingEngine(self.network)
        self.shelf = FakeShelf(self.engine)
        self.records = Records()
        self.dispatcher = Dispatcher(self.shelf, self.records)  # type: ignore[arg-type]
        self.digests = digests = DigestWorker(1)
        self.fingerprints = fingerprints = Fingerprints()

        def bind(patcher: Any) -> ModelBinding:  # a closure, since a method would keep the base patcher alive
            return ModelBinding(patcher, Source("small"), digests, fingerprints, lambda *_: DIGEST, lambda *_: None)

        self.bind = bind

    def model(self, patcher: Any = None) -> Any:
        return accelerate(self.base if patcher is None else patcher, self.bind, self.dispatcher, "auto")

    @property
    def torch_calls(self) -> int:
        return sum(record.torch.count for record in self._records())

    def _records(self) -> list[Record]:
        return self.records.select(None)

    @property
    def codes(self) -> set[str]:
        """Codes of all blockers of all decided calls."""
        return {refusal.code for call in self.shelf.calls for refusal in call.blockers}

    def compare(
        self, change: Callable[[Any], Any] = lambda patcher: None, *, before: bool = False, **options: Any
    ) -> torch.Tensor:
        """Sample stock, then accelerated, with `change` made to either; both latents are equal bit for bit.

        before: `change` a clone that is accelerated then, instead of the accelerated clone.
        Counters are those of the accelerated run alone.
        """
        stock = self.base.clone()
        change(stock)
        expected = sample(stock, **options)
        assert torch.isfinite(expected).all()
        assert expected.std() > 0.01
        ours = self.base.clone()
        if before:
            change(ours)
        ours = self.model(ours)
        if not before:
            change(ours)
        assert self.engine.calls == 0
        assert not self.shelf.calls
        found = sample(ours, **options)
        assert torch.equal(expected, found), f"differs by {(expected - found).abs().max()}"
        assert "forward" not in self.base.model.diffusion_model.__dict__
        return found


def at(patcher: Any) -> Any:
    """The small UNet's attention block in the middle: what most cases patch."""
    return patcher.model.diffusion_model.middle_block[1].transformer_blocks[0]


LORA_KEY = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"
OTHER_KEY = "diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_v"


def lora_file(seed: int, key: str = LORA_KEY, width: int = 64, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA as it lies in a file, for one square weight of the small UNet."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{key}.lora_up.weight": torch.randn(width, rank, generator=generator),
        f"{key}.lora_down.weight": torch.randn(rank, width if key == LORA_KEY else CONTEXT, generator=generator),
        f"{key}.alpha": torch.tensor(float(rank)),
    }


def add_lora(patcher: Any, file: dict[str, torch.Tensor], strength: float) -> None:
    """What the LoRA loader node does with the model."""
    import comfy.lora

    known = comfy.lora.model_lora_keys_unet(patcher.model, {})
    taken = patcher.add_patches(comfy.lora.load_lora(file, known), strength)
    assert taken, "ComfyUI knows none of the LoRA's keys"
