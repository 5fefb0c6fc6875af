"""What the dispatcher adds to one network call with a cached decision, in microseconds.

    python bench/dispatch_overhead.py --comfyui PATH [--out FILE.json]

A real ComfyUI BaseModel and ModelPatcher, with a network that does nothing, so that only the calls around it are
timed: stock `apply_model`, the same through the dispatcher deciding for PyTorch, and through it with an engine that
does nothing (the finite check of its output included). Rounds of the three alternate; the figure is the median of
the differences between neighbours.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 60
CALLS = 200


def _import_pack() -> None:
    module = types.ModuleType("kitchen_accel")
    module.__path__ = [str(ROOT)]
    sys.modules["kitchen_accel"] = module


def make_patcher() -> Any:
    """A ModelPatcher of an SD1.5 BaseModel whose network returns its input."""
    import comfy.model_patcher
    import comfy.ops
    import comfy.supported_models
    import torch
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    class Nothing(UNetModel):  # type: ignore[misc]
        def _forward(  # ComfyUI passes all of them by position
            self, x: Any, timesteps: Any = None, context: Any = None, y: Any = None, control: Any = None,
            transformer_options: Any = None, **kwargs: Any,
        ) -> Any:  # fmt: skip
            return x

    config = {
        "image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 32, "num_res_blocks": [1],
        "channel_mult": [1], "transformer_depth": [0], "transformer_depth_output": [0, 0],
        "transformer_depth_middle": -1, "context_dim": 768, "num_heads": 8, "use_spatial_transformer": True,
        "use_linear_in_transformer": False, "adm_in_channels": None, "dtype": torch.float32,
    }  # fmt: skip
    settings = comfy.supported_models.SD15(config)
    model = settings.get_model({}, "")
    model.diffusion_model.__class__ = Nothing
    return comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.path[0] = str(arguments.comfyui.resolve())
    sys.argv = sys.argv[:1]
    from comfy.cli_args import args

    args.cpu = True
    _import_pack()
    import torch
    from comfyui_version import __version__ as comfy_version
    from kitchen_accel.backends.base import Decision
    from kitchen_accel.host.binding import KEY, ApplyModel
    from kitchen_accel.host.model import ModelBinding, Source
    from kitchen_accel.host.weights import DigestWorker, Fingerprints
    from kitchen_accel.scheduler.dispatch import Dispatcher
    from kitchen_accel.scheduler.engines import Lease
    from kitchen_accel.scheduler.figures import Records

    answer = torch.zeros(2, 4, 64, 64)

    class NoEngine:
        device, precision, calls, device_bytes = "CPU", "fp32", 0, 0

        def run(self, inputs: Any) -> Any:
            return answer

    class Shelf:
        """Decides once; nothing of it is on the hot path."""

        fallback_forbidden = False

        def __init__(self, backend: str) -> None:
            self.backend = backend
            self.host = types.SimpleNamespace(interrupts=())

        def decide(self, model: Any, call: Any, inputs: Any, wanted: str) -> tuple[Decision, Any]:
            precision: Any = None if self.backend == "cuda" else "fp32"
            return Decision(self.backend, "bench", wanted, "d", precision), call  # type: ignore[arg-type]

        def lease(self, decision: Any, call: Any) -> Lease:
            return Lease(("d",), NoEngine())  # type: ignore[arg-type]

        def proven(self, decision: Any, call: Any) -> bool:
            return True

        def offer(self, call: Any, decision: Any) -> str:
            return ""

        def announce(self, label: str, call: Any, decision: Any) -> None:
            pass

        def release(self, lease: Any) -> None:
            pass

    patcher = make_patcher()
    model = patcher.model
    model.current_patcher = patcher
    x, t = torch.randn(2, 4, 64, 64), torch.tensor([1.0, 1.0])
    context = torch.randn(2, 77, 768)
    sigmas = torch.linspace(14, 0, 21)

    def options(backend: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {
            "wrappers": {}, "callbacks": {}, "sample_sigmas": sigmas, "cond_or_uncond": [1, 0], "uuids": [1, 2],
            "sigmas": t[:1],
        }  # fmt: skip
        if backend is not None:
            dispatcher = Dispatcher(Shelf(backend), Records())  # type: ignore[arg-type]

            def bind(any_patcher: Any) -> ModelBinding:
                return ModelBinding(
                    any_patcher, Source("bench"), DigestWorker(1), Fingerprints(), lambda *_: "0" * 64, lambda *_: None
                )

            found["wrappers"] = {"apply_model": {KEY: [ApplyModel(bind, dispatcher, "auto")]}}
        return found

    cases = {"stock": options(None), "pytorch": options("cuda"), "engine": options("openvino")}

    def once(name: str) -> float:
        transformer_options = cases[name]
        started = time.perf_counter()
        for _ in range(CALLS):
            model.apply_model(x, t, c_crossattn=context, transformer_options=transformer_options)
        return (time.perf_counter() - started) / CALLS * 1e6

    figures: dict[str, list[float]] = {name: [] for name in cases}
    with torch.inference_mode():
        for name in cases:
            once(name)
        for _ in range(ROUNDS):
            for name in cases:
                figures[name].append(once(name))
    added = {
        name: statistics.median(b - a for a, b in zip(figures["stock"], figures[name], strict=True))
        for name in ("pytorch", "engine")
    }
    result = {
        "what": "microseconds a call; `added` is over stock apply_model with a network that does nothing",
        "command": "python bench/dispatch_overhead.py --comfyui PATH",
        "comfyui": comfy_version,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "calls": ROUNDS * CALLS,
        "median_us": {name: round(statistics.median(values), 2) for name, values in figures.items()},
        "added_us": {name: round(value, 2) for name, value in added.items()},
        "target_us": 50,
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
