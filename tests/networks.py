"""Small networks for the tests of captures and engines: one of our own, and ComfyUI's own classes, shrunk."""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WIDTH = 48
"""Width of the text embedding of every network here."""

LABELS = 40
"""Width of the `y` of networks that have one."""


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transformer_options: dict[str, Any]
) -> torch.Tensor:
    """Attention as ComfyUI dispatches it; its own way written out, so that it is not the override's."""
    override = transformer_options.get("optimized_attention_override")
    if override is not None:
        out: torch.Tensor = override(softmax_attention, q, k, v, heads, transformer_options=transformer_options)
        return out
    n, t, width = q.shape
    q, k, v = (x.view(n, -1, heads, width // heads).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, width)


class TinyUNet(torch.nn.Module):
    """Two levels, cross attention at the lower one, and a way up that takes the skip's size, odd or even.

    x `(N, 4, H, W)`, timesteps `(N,)`, context `(N, T, 48)` -> `(N, 4, H, W)`.
    """

    def __init__(self, channels: int = 32, *, most: int | None = None) -> None:
        super().__init__()
        self.most = most
        self.enter = torch.nn.Conv2d(4, channels, 3, padding=1)
        self.time = torch.nn.Linear(2, channels)
        self.down = torch.nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        self.norm = torch.nn.GroupNorm(8, channels)
        self.q = torch.nn.Linear(channels, channels)
        self.k = torch.nn.Linear(WIDTH, channels)
        self.v = torch.nn.Linear(WIDTH, channels)
        self.leave = torch.nn.Conv2d(2 * channels, 4, 3, padding=1)

    def forward(
        self,
        x: torch.Tensor,
        timesteps: torch.Tensor,
        context: torch.Tensor,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        if self.most is not None and x.shape[2] > self.most:
            raise ValueError(f"at most {self.most} pixels high")
        angle = timesteps[:, None] / 1000.0
        time = self.time(torch.cat([angle.cos(), angle.sin()], dim=1))
        skip = self.enter(x) + time[:, :, None, None]
        h = self.norm(self.down(skip))
        n, c, height, width = h.shape
        tokens = h.movedim(1, 3).flatten(1, 2)
        q, k, v = self.q(tokens), self.k(context), self.v(context)
        tokens = tokens + softmax_attention(q, k, v, 4, transformer_options or {})
        h = tokens.reshape(n, height, width, c).movedim(3, 1)
        h = torch.nn.functional.interpolate(h, size=skip.shape[2:], mode="nearest")
        out: torch.Tensor = self.leave(torch.cat([h, skip], dim=1))
        return out


def filled(network: torch.nn.Module) -> torch.nn.Module:
    """`network` with weights that keep its activations near 1, in eval mode. ComfyUI leaves weights uninitialised."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
            noise = torch.randn(tensor.shape, generator=draw)
            if tensor.ndim > 1:
                tensor.copy_(noise * 0.7 / math.sqrt(math.prod(tensor.shape[1:])))
            else:
                tensor.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
    return network.eval().requires_grad_(False)


def tiny() -> torch.nn.Module:
    return filled(TinyUNet())


class ComfyNetworks:
    """ComfyUI's own classes out of one source tree, on the CPU. Made once per process: ComfyUI is global."""

    def __init__(self, tree: Path) -> None:
        sys.path.insert(0, str(tree))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # ComfyUI's own business
                importlib.import_module("comfy.cli_args").args.cpu = True
                self._ops = importlib.import_module("comfy.ops").disable_weight_init
                models = "comfy.ldm.modules.diffusionmodules"
                self._unet = importlib.import_module(f"{models}.openaimodel").UNetModel
                self._mmdit = importlib.import_module(f"{models}.mmdit").OpenAISignatureMMDITWrapper
                self.attention = importlib.import_module("comfy.ldm.modules.attention")
        finally:
            sys.path.remove(str(tree))

    def unet(self) -> torch.nn.Module:
        """SD1.5's kind, two levels."""
        return self._unet_of(
            num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0],
            transformer_depth_middle=1, use_linear_in_transformer=False, num_heads=4, num_head_channels=-1,
        )  # fmt: skip

    def sdxl(self) -> torch.nn.Module:
        """SDXL's kind, three levels and a `y`."""
        return self._unet_of(
            num_res_blocks=[1] * 3, channel_mult=[1, 1, 2], transformer_depth=[0, 1, 1],
            transformer_depth_output=[0, 0, 1, 1, 1, 1], transformer_depth_middle=1, use_linear_in_transformer=True,
            num_heads=-1, num_head_channels=16, num_classes="sequential", adm_in_channels=LABELS,
        )  # fmt: skip

    def _unet_of(self, **arguments: Any) -> torch.nn.Module:
        return filled(
            self._unet(
                image_size=32, in_channels=4, out_channels=4, model_channels=32, use_spatial_transformer=True,
                legacy=False, use_checkpoint=False, context_dim=WIDTH, dtype=torch.float32, device="cpu",
                operations=self._ops, **arguments,
            )
        )  # fmt: skip

    def mmdit(self) -> torch.nn.Module:
        """SD3's kind, two joint blocks, a table of 64 by 64 positions: latents up to 128 by 128."""
        embedder = {"target": "torch.nn.Linear", "params": {"in_features": WIDTH, "out_features": 128}}
        return filled(
            self._mmdit(
                input_size=None, patch_size=2, in_channels=16, out_channels=16, depth=2, adm_in_channels=LABELS,
                num_patches=64 * 64, pos_embed_max_size=64, context_embedder_config=embedder, qkv_bias=True,
                dtype=torch.float32, device="cpu", operations=self._ops,
            )
        )  # fmt: skip


Sizes = tuple[int, int, int, int]
"""Batch, height, width, tokens."""


def inputs_of(channels: int = 4, *, y: bool = False) -> Callable[[Sizes], dict[str, torch.Tensor]]:
    """A function that makes a network's inputs of some sizes, always the same ones."""

    def make(sizes: Sizes) -> dict[str, torch.Tensor]:
        batch, height, width, tokens = sizes
        draw = torch.Generator().manual_seed(sum(sizes))
        made = {
            "x": torch.randn(batch, channels, height, width, generator=draw),
            "timesteps": torch.rand(batch, generator=draw) * 999,
            "context": torch.randn(batch, tokens, WIDTH, generator=draw),
        }
        if y:
            made["y"] = torch.randn(batch, LABELS, generator=draw)
        return made

    return make


def class_name(network: torch.nn.Module) -> str:
    return f"{type(network).__module__}.{type(network).__qualname__}"
