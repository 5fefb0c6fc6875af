"""ComfyUI's own loading functions, so that an accelerated model is exactly the stock one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .runtime import runtime

WEIGHT_DTYPES = ("default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
"""What ComfyUI's own diffusion model loader offers (nodes.py, UNETLoader)."""


def names(folder: str) -> list[str]:
    """File names in one of ComfyUI's model folders, e.g. `"checkpoints"`; empty where the folder is missing."""
    import folder_paths

    try:
        return list(folder_paths.get_filename_list(folder))
    except (OSError, KeyError):
        return []


def load_checkpoint(name: str, backend: str) -> tuple[Any, Any, Any]:
    """(MODEL accelerated, CLIP, VAE) of a checkpoint. Raises what ComfyUI's loader raises."""
    import comfy.sd
    import folder_paths

    path = folder_paths.get_full_path_or_raise("checkpoints", name)
    source = runtime().source(name, Path(path))
    model, clip, vae = comfy.sd.load_checkpoint_guess_config(
        path, output_vae=True, output_clip=True, embedding_directory=folder_paths.get_folder_paths("embeddings")
    )[:3]
    return runtime().accelerate(model, source, backend), clip, vae


def load_diffusion_model(name: str, weight_dtype: str, backend: str) -> Any:
    """MODEL accelerated, of a file with the network alone. Raises what ComfyUI's loader raises."""
    import comfy.sd
    import folder_paths
    import torch

    options: dict[str, Any] = {}
    if weight_dtype.startswith("fp8_e4m3fn"):
        options["dtype"] = torch.float8_e4m3fn
        if weight_dtype.endswith("_fast"):
            options["fp8_optimizations"] = True
    elif weight_dtype == "fp8_e5m2":
        options["dtype"] = torch.float8_e5m2
    path = folder_paths.get_full_path_or_raise("diffusion_models", name)
    source = runtime().source(name, Path(path), weight_dtype)
    model = comfy.sd.load_diffusion_model(path, model_options=options)
    return runtime().accelerate(model, source, backend)


def accelerate(model: Any, backend: str) -> Any:
    """MODEL accelerated, whichever loader it came from."""
    return runtime().accelerate(model, runtime().source_of(model), backend)
