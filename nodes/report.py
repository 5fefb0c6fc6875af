"""What ran where and why, shown in the node."""

from __future__ import annotations

import json
from typing import Any, ClassVar

from ..host import reports
from .inputs import CATEGORY


class KitchenReport:
    """Shows, per model and shape, the backend that ran, why, what was rejected, times and fallbacks."""

    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("text",)
    OUTPUT_TOOLTIPS = ("The report as text.",)
    FUNCTION = "report"
    CATEGORY = CATEGORY
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Shows which backend ran the model, why, every rejected backend with its reasons, step times and fallbacks. "
        "Connect the sampler's output to `after`, so that it reports on the run that has just ended."
    )
    SEARCH_ALIASES: ClassVar[list[str]] = ["which backend", "why", "log", "speed"]

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"model": ("MODEL", {"tooltip": "Accelerated model to report on. No default, no unit."})},
            "optional": {
                "after": (
                    "*",
                    {
                        "tooltip": "Anything the sampler made, e.g. its LATENT: the report then runs after it. "
                        "Default: not connected. No unit."
                    },
                )
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, input_types: dict[str, str]) -> bool:
        # `after` takes a link of any type; naming `input_types` tells ComfyUI to leave the types to us
        return input_types.get("model", "MODEL") == "MODEL"

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        # the report is of what has happened meanwhile, so an unchanged input is no reason to reuse the old one
        return float("nan")

    def report(self, model: Any, after: Any = None) -> dict[str, Any]:
        found = reports.report_of(model)
        text = reports.as_text(found)
        return {"ui": {"text": [text], "kitchen": [json.dumps(found)]}, "result": (text,)}
