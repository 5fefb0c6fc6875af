"""Inputs several nodes share."""

from __future__ import annotations

from typing import Any

BACKENDS = ("auto", "cuda", "tensorrt", "openvino", "directml")

CATEGORY = "kitchen"


def backend_input() -> tuple[list[str], dict[str, Any]]:
    """The `backend` widget."""
    return (
        list(BACKENDS),
        {
            "default": "auto",
            "tooltip": "Backend that runs the model's network. Default: auto, which is backend.default of "
            "comfy_kitchen.yaml (there, auto is the fastest backend that is proven right). cuda is ComfyUI's own "
            "PyTorch path on whatever device ComfyUI uses. A backend that cannot serve a call falls back to cuda and "
            "the report says why. No unit.",
        },
    )
