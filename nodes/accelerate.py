"""Acceleration of a model from any loader."""

from __future__ import annotations

from typing import Any, ClassVar

from ..host import loaders
from .inputs import CATEGORY, backend_input


class KitchenAccelerate:
    """Accelerates a MODEL, whichever loader it came from."""

    RETURN_TYPES = ("MODEL",)
    OUTPUT_TOOLTIPS = ("The same model; its network runs on the chosen backend.",)
    FUNCTION = "accelerate"
    CATEGORY = CATEGORY
    DESCRIPTION = "Accelerates a model from any loader. Put it after LoRA nodes or before them: both work."
    SEARCH_ALIASES: ClassVar[list[str]] = ["accelerate", "openvino", "tensorrt", "speed"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "Diffusion model to accelerate. No default, no unit."}),
                "backend": backend_input(),
            }
        }

    def accelerate(self, model: Any, backend: str) -> tuple[Any]:
        return (loaders.accelerate(model, backend),)
