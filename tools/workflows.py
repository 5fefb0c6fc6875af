"""Workflows in ComfyUI's API format, built from values. Pure: nothing here talks to a server.

A workflow maps node ids to `{"class_type": ..., "inputs": ...}`; a link is `[node id, output index]`.
Node ids are words, so that a test can say which node it means: `loader`, `positive`, `negative`, `latent`,
`sampler`, `decode`, `save`, `report`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STOCK_LOADER = "CheckpointLoaderSimple"
KITCHEN_LOADER = "KitchenCheckpointLoader"

Workflow = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Loader:
    """The node that gives MODEL, CLIP and VAE.

    class_type: its node class. backend: value of its `backend` input, or None for a loader without one.
    """

    class_type: str = STOCK_LOADER
    backend: str | None = None

    def node(self, ckpt: str) -> dict[str, Any]:
        inputs: dict[str, Any] = {"ckpt_name": ckpt}
        if self.backend is not None:
            inputs["backend"] = self.backend
        return {"class_type": self.class_type, "inputs": inputs}


STOCK = Loader()


def kitchen(backend: str) -> Loader:
    """Our checkpoint loader, asked for `backend`."""
    return Loader(KITCHEN_LOADER, backend)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What KSampler is told.

    steps: sampling steps. cfg: guidance scale; 1.0 drops the negative pass. denoise: 1.0 starts from pure noise.
    """

    seed: int = 1
    steps: int = 2
    cfg: float = 7.0
    sampler: str = "euler"
    scheduler: str = "normal"
    denoise: float = 1.0


def txt2img(
    ckpt: str,
    loader: Loader = STOCK,
    *,
    width: int = 64,
    height: int = 64,
    batch: int = 1,
    prompt: str = "a red kitchen",
    negative: str = "blurry",
    sampling: Sampling | None = None,
    report: bool = False,
) -> Workflow:
    """Text to image with checkpoint file `ckpt`.

    width, height: pixels, multiples of 8. batch: pictures. report: add a `KitchenReport` after the sampler.
    """
    latent = {
        "class_type": "EmptyLatentImage",
        "inputs": {"width": width, "height": height, "batch_size": batch},
    }
    return _finish({"latent": latent}, ckpt, loader, prompt, negative, sampling or Sampling(), report)


def img2img(
    ckpt: str,
    image: str,
    loader: Loader = STOCK,
    *,
    prompt: str = "a red kitchen",
    negative: str = "blurry",
    sampling: Sampling | None = None,
    report: bool = False,
) -> Workflow:
    """Image to image from the file `image` in ComfyUI's input folder. Without `sampling`, denoise is 0.6."""
    nodes: Workflow = {
        "image": {"class_type": "LoadImage", "inputs": {"image": image}},
        "latent": {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["loader", 2]}},
    }
    return _finish(nodes, ckpt, loader, prompt, negative, sampling or Sampling(steps=4, denoise=0.6), report)


def _finish(
    nodes: Workflow, ckpt: str, loader: Loader, prompt: str, negative: str, sampling: Sampling, report: bool
) -> Workflow:
    """Everything that follows the latent."""
    workflow: Workflow = {
        **nodes,
        "loader": loader.node(ckpt),
        "positive": {"class_type": "CLIPTextEncode", "inputs": {"text": prompt, "clip": ["loader", 1]}},
        "negative": {"class_type": "CLIPTextEncode", "inputs": {"text": negative, "clip": ["loader", 1]}},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["loader", 0],
                "positive": ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["latent", 0],
                "seed": sampling.seed,
                "steps": sampling.steps,
                "cfg": sampling.cfg,
                "sampler_name": sampling.sampler,
                "scheduler": sampling.scheduler,
                "denoise": sampling.denoise,
            },
        },
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["loader", 2]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "kitchen"}},
    }
    if report:
        workflow["report"] = {
            "class_type": "KitchenReport",
            "inputs": {"model": ["loader", 0], "after": ["sampler", 0]},
        }
    return workflow
