"""Loaders that stand in for ComfyUI's own."""

from __future__ import annotations

from typing import Any, ClassVar

from ..host import loaders
from .inputs import CATEGORY, backend_input


class KitchenCheckpointLoader:
    """Stands in for `Load Checkpoint`: the same MODEL, CLIP and VAE, the model accelerated."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    OUTPUT_TOOLTIPS = (
        "The diffusion model. Its network runs on the chosen backend, everything else is ComfyUI's.",
        "The text encoder, as ComfyUI loads it.",
        "The VAE, as ComfyUI loads it.",
    )
    FUNCTION = "load"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads a checkpoint and accelerates its diffusion model. Swap it for Load Checkpoint."
    SEARCH_ALIASES: ClassVar[list[str]] = ["load checkpoint", "accelerate", "openvino", "tensorrt"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "ckpt_name": (
                    loaders.names("checkpoints"),
                    {"tooltip": "Checkpoint file to load. Default: the first one found. No unit."},
                ),
                "backend": backend_input(),
            }
        }

    def load(self, ckpt_name: str, backend: str) -> tuple[Any, Any, Any]:
        return loaders.load_checkpoint(ckpt_name, backend)


class KitchenDiffusionModelLoader:
    """Stands in for `Load Diffusion Model`: the same MODEL, accelerated."""

    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The diffusion model. Its network runs on the chosen backend, everything else is ComfyUI's.",)
    FUNCTION = "load"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads a diffusion model file and accelerates it. Swap it for Load Diffusion Model."
    SEARCH_ALIASES: ClassVar[list[str]] = ["unet loader", "load diffusion model", "accelerate"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "unet_name": (
                    loaders.names("diffusion_models"),
                    {"tooltip": "Diffusion model file to load. Default: the first one found. No unit."},
                ),
                "weight_dtype": (
                    list(loaders.WEIGHT_DTYPES),
                    {
                        "default": "default",
                        "tooltip": "Dtype the weights are kept in, as in ComfyUI's own loader. Default: default, "
                        "the file's own. No unit.",
                    },
                ),
                "backend": backend_input(),
            }
        }

    def load(self, unet_name: str, weight_dtype: str, backend: str) -> tuple[Any]:
        return (loaders.load_diffusion_model(unet_name, weight_dtype, backend),)
