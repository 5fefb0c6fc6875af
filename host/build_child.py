"""The build process: makes the network from ComfyUI's own class and hands it to the scheduler's child.

Run as a script with the job folder as its only argument. ComfyUI is imported for the CPU alone, so that a
build never touches the GPU a prompt is running on.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

_PACK = Path(__file__).resolve().parents[1]


def _import_pack() -> None:
    """Make `kitchen_accel` importable without running the pack's __init__, which is ComfyUI's node entry."""
    if "kitchen_accel" not in sys.modules:
        module = types.ModuleType("kitchen_accel")
        module.__path__ = [str(_PACK)]
        sys.modules["kitchen_accel"] = module


def make_module(network: dict[str, Any], folder: Path) -> tuple[Any, dict[str, Any]]:
    """(the network in eval mode with its weights, example inputs by name) from a job's `network` values.

    Raises CaptureError when the class is not ComfyUI's or the weights do not fit it.
    """
    from kitchen_accel.errors import CaptureError
    from kitchen_accel.host.model import decode_config

    if network["module"].split(".")[0] != "comfy":
        raise CaptureError("the network's class is not ComfyUI's own", got=network["module"], allowed="comfy.*")
    sys.path.insert(0, network["comfy_root"])
    # ComfyUI reads its flags from argv when it is first imported
    sys.argv = sys.argv[:1]
    from comfy.cli_args import args

    args.cpu = True
    import comfy.ops
    import torch
    from safetensors.torch import load_file

    cls = getattr(importlib.import_module(network["module"]), network["class"])
    dtype = getattr(torch, network["compute_dtype"])
    config = {**decode_config(network["config"]), "dtype": dtype}
    with torch.no_grad():
        module = cls(**config, device=torch.device("cpu"), operations=comfy.ops.disable_weight_init)
        weights = load_file(str(folder / network["weights"]))
        missing = module.state_dict().keys() ^ weights.keys()
        if missing:
            raise CaptureError("the weights do not fit the network", got=", ".join(sorted(missing)[:4]))
        module.load_state_dict({k: v.to(dtype) for k, v in weights.items()}, assign=True)
    module.eval().requires_grad_(False)
    return module, load_file(str(folder / network["example"]))


def main() -> int:
    _import_pack()
    child = importlib.import_module("kitchen_accel.scheduler.child")
    code: int = child.main(Path(sys.argv[1]), make_module)
    return code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # native libraries can crash while the interpreter shuts down, and by now the result is complete
    os._exit(status)
