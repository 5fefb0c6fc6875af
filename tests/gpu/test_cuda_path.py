"""The PyTorch path on a real NVIDIA GPU: the same latents to the bit, the reasons, and times that the device measured.

Needs a CUDA device and `COMFYUI_PATH`; ComfyUI is imported into this process, so run this folder by itself.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not os.environ.get("COMFYUI_PATH"):
    pytest.skip("COMFYUI_PATH names no ComfyUI", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SHAPE = (1, 4, 64, 64)
STEPS = 6


@pytest.fixture(scope="module")
def patcher() -> Any:
    """SD1.5's network at 64 channels with random fp16 weights, on the GPU."""
    sys.path.append(str(Path(os.environ["COMFYUI_PATH"]).resolve()))
    import comfy.model_management as mm
    import comfy.model_patcher
    import comfy.supported_models

    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 64, "num_res_blocks": [2, 2, 2, 2],
        "channel_mult": [1, 2, 4, 4], "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
        "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], "transformer_depth_middle": 1,
        "context_dim": 768, "num_heads": 8, "use_spatial_transformer": True, "use_linear_in_transformer": False,
        "adm_in_channels": None, "dtype": torch.float16,
    }  # fmt: skip
    model = comfy.supported_models.SD15(config).get_model({}, "")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.diffusion_model.state_dict().values():
            fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return comfy.model_patcher.ModelPatcher(model, mm.get_torch_device(), torch.device("cpu"))


def sample(patcher: Any, seed: int) -> Any:
    import comfy.sample

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(SHAPE, generator=generator)
    positive, negative = ([[torch.randn(1, 77, 768, generator=generator), {}]] for _ in range(2))
    return comfy.sample.sample(
        patcher, noise, STEPS, 7.0, "euler", "normal", positive, negative, torch.zeros(SHAPE), disable_pbar=True,
        seed=seed,
    )  # fmt: skip


def test_the_same_latents_to_the_bit_with_reasons_and_times(patcher: Any, tmp_path: Path) -> None:
    from kitchen_accel.host.model import Source
    from kitchen_accel.host.runtime import Runtime

    # convolution algorithms are chosen by trying them at the first calls, so what stock itself repeats is the reference
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    sample(patcher, 1)
    assert torch.equal(sample(patcher, 1), sample(patcher, 1)), "stock ComfyUI does not repeat itself here"
    runtime = Runtime(tmp_path / "user", tmp_path, tmp_path / "models")
    for wanted in ("auto", "cuda", "openvino", "tensorrt", "directml"):
        ours = runtime.accelerate(patcher, Source(wanted), wanted)
        expected = sample(patcher, 1)
        assert torch.isfinite(expected).all()
        assert expected.std() > 0.1
        assert torch.equal(expected, sample(ours, 1)), wanted
        (entry,) = runtime.report(wanted)["entries"]
        assert entry["backend"] == "cuda"
        assert entry["engine_calls"] == 0
        assert entry["torch_calls"] == STEPS
        assert set(entry["rejected"]) == {"tensorrt", "openvino", "directml"}
        assert all(entry["rejected"].values())
        # events, not the host's clock: launching this network takes the host longer than zero and is not its run time
        assert entry["torch_step_ms"] > 0
    codes = runtime.report("openvino")["entries"][0]["codes"]["openvino"]
    assert {"missing-library", "call-device"} & set(codes)


def test_events_agree_with_a_synchronised_clock(patcher: Any) -> None:
    """What the report calls a step time is the time the device takes for the call."""
    from kitchen_accel.scheduler.figures import CudaClock, Steps

    device = "cuda:0"
    a = torch.randn(4096, 4096, device=device)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    clock, steps = CudaClock(device), Steps()
    for _ in range(5):
        token = clock.begin()
        for _ in range(20):
            a @ a
        clock.end(token, steps)
    clock.settle()
    assert steps.count == 5
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        a @ a
    end.record()
    torch.cuda.synchronize()
    assert steps.median_s == pytest.approx(begin.elapsed_time(end) / 1000, rel=0.5)
