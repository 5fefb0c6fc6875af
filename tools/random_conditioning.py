"""A custom node for tests, of one file: conditioning from a seed, for checkpoints without a text encoder."""

from __future__ import annotations

from typing import Any, ClassVar


class RandomConditioning:
    """Conditioning of `(1, tokens, width)` and, when `pooled` is not 0, a pooled vector `(1, pooled)`; float32."""

    CATEGORY = "kitchen/testing"
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"

    SIZE: ClassVar[tuple[str, dict[str, int]]] = ("INT", {"default": 77, "min": 0, "max": 8192})

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """`seed`, `tokens` (count), `width` and `pooled` (numbers a token, a vector)."""
        seed = ("INT", {"default": 0, "min": 0, "max": 2**32})
        return {"required": {"seed": seed, "tokens": cls.SIZE, "width": cls.SIZE, "pooled": cls.SIZE}}

    def make(self, seed: int, tokens: int, width: int, pooled: int) -> tuple[list[list[Any]]]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        extra = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
        return ([[torch.randn(1, tokens, width, generator=generator), extra]],)


NODE_CLASS_MAPPINGS = {"RandomConditioning": RandomConditioning}
NODE_DISPLAY_NAME_MAPPINGS = {"RandomConditioning": "Random conditioning (testing)"}
