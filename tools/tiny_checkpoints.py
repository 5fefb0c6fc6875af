"""Tiny checkpoints with random weights that stock ComfyUI loaders detect as the real families.

    python tiny_checkpoints.py --comfyui PATH FOLDER NAME [NAME ...]

writes `FOLDER/NAME` for each of the names in `RECIPES`, through a temporary file, and leaves existing files alone.
Runs as its own program: importing ComfyUI's `comfy` package fixes the device of the whole process.

What the detection fixes, so cannot shrink (`comfy/model_detection.py`, `comfy/supported_models.py`): SD1.5 and SDXL
need 320 model channels; the SDXL family an exact transformer depth (KOALA's `[0, 2, 5]` is the smallest); SD3 a
width of 64 per block; CLIP-L and CLIP-G their full sizes. What keeps the files small all the same:

- TAESD in place of the 84 M parameter VAE, its last layer calibrated so that pictures are mid-grey and not black;
- a `.safetensors` holds CLIP as float8; a `.ckpt` holds it as strided views of one small buffer, which `torch.save`
  stores once. The UNet and the VAE always have full random weights, so that comparing pictures means something.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

StateDict = dict[str, "torch.Tensor"]

UNET_PREFIX = "model.diffusion_model."
VAE_PREFIX = "first_stage_model."
CLIP_L_SD15 = "cond_stage_model.transformer."
CLIP_L_SDXL = "conditioner.embedders.0.transformer."
CLIP_G_SDXL = "conditioner.embedders.1.model.transformer."

GAIN = 0.7
"""Standard deviation of a layer's output for inputs of deviation 1: below 1, so that deep networks stay finite."""

NOISE_SD15 = 14.6
"""Deviation of the noise SD1.5 and SDXL start from. A random network removes none of it, so it reaches the VAE."""

SCALE_SD15, SCALE_SDXL, SCALE_SD3 = 0.18215, 0.13025, 1.5305
"""`vae_scale` of the real TAESD of each family: the latent format's own factor."""


def _weight(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    """A random weight of `shape`, float32; vectors are the neutral 1 (0 for a bias)."""
    import torch

    if len(shape) > 1:
        return torch.randn(shape, generator=generator) * (GAIN / math.sqrt(math.prod(shape[1:])))
    return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)


def _random(module: torch.nn.Module, prefix: str, seed: int, matrix_dtype: str = "float16") -> StateDict:
    """Random weights for `module`: vectors in float16, everything else in `matrix_dtype`."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        prefix + name: _weight(tuple(value.shape), name, generator).to(
            getattr(torch, matrix_dtype) if value.ndim > 1 else torch.float16
        )
        for name, value in module.state_dict().items()
    }


def _strided(module: torch.nn.Module, prefix: str, seed: int, buffer_size: int = 1 << 18) -> StateDict:
    """Weights for `module` whose matrices are float16 views of one buffer of `buffer_size` numbers per fan-in."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(buffer_size, generator=generator)
    buffers: dict[int, torch.Tensor] = {}
    state: StateDict = {}
    for name, value in module.state_dict().items():
        shape = tuple(value.shape)
        if len(shape) < 2:
            state[prefix + name] = _weight(shape, name, generator).to(torch.float16)
            continue
        octave = round(math.log2(math.prod(shape[1:])))
        if octave not in buffers:
            buffers[octave] = (noise * (GAIN / math.sqrt(2.0**octave))).to(torch.float16)
        # one stride for all axes, a little less for each further one, so that rows and columns do not repeat each other
        step = (buffer_size - 1) // sum(size - 1 for size in shape)
        strides = tuple(max(1, step - axis % 3) for axis in range(len(shape)))
        state[prefix + name] = buffers[octave].as_strided(shape, strides)
    return state


def _unet(depths: list[int], **options: Any) -> torch.nn.Module:
    """ComfyUI's UNet on the meta device: one residual block on each of `len(depths)` levels, 320 channels."""
    import comfy.ops
    import torch
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    settings: dict[str, Any] = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 320,
        "num_res_blocks": [1] * len(depths),
        "channel_mult": [1] * len(depths),
        "transformer_depth": depths,
        "transformer_depth_middle": 1,
        "use_spatial_transformer": True,
        "use_checkpoint": False,
        "legacy": False,
        "dtype": torch.float32,
        "device": torch.device("meta"),
        "operations": comfy.ops.disable_weight_init,
    }
    network: torch.nn.Module = UNetModel(**{**settings, **options})
    return network


def _unet_sd15(in_channels: int = 4) -> torch.nn.Module:
    return _unet(
        [1, 0],
        in_channels=in_channels,
        transformer_depth_output=[1, 1, 0, 0],
        use_linear_in_transformer=False,
        context_dim=768,
        num_heads=8,
        num_head_channels=-1,
    )


def _unet_sd15_small() -> torch.nn.Module:
    """One level: the least a loader takes for SD1.5."""
    return _unet(
        [1],
        transformer_depth_middle=-1,
        transformer_depth_output=[0, 0],
        use_linear_in_transformer=False,
        context_dim=768,
        num_heads=8,
        num_head_channels=-1,
    )


def _unet_sdxl() -> torch.nn.Module:
    return _unet(
        [0, 2, 5],
        transformer_depth_output=[0] * 6,
        use_linear_in_transformer=True,
        context_dim=2048,
        num_heads=-1,
        num_head_channels=64,
        num_classes="sequential",
        adm_in_channels=2816,
    )


def _mmdit() -> torch.nn.Module:
    """SD3's network with one block, 64 wide."""
    import comfy.ops
    import torch
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    network: torch.nn.Module = OpenAISignatureMMDITWrapper(
        input_size=None,
        patch_size=2,
        in_channels=16,
        depth=1,
        adm_in_channels=2048,
        out_channels=16,
        num_patches=64 * 64,
        pos_embed_max_size=64,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 64},
        },
        qkv_bias=True,
        dtype=torch.float32,
        device=torch.device("meta"),
        operations=comfy.ops.disable_weight_init,
    )
    return network


def _clip(config_name: str) -> torch.nn.Module:
    """A full-size CLIP text encoder on the meta device, from ComfyUI's own configuration file."""
    import json

    import comfy.clip_model
    import comfy.ops
    import torch

    config = json.loads((Path(comfy.clip_model.__file__).parent / config_name).read_text(encoding="utf-8"))
    encoder: torch.nn.Module = comfy.clip_model.CLIPTextModel(
        config, torch.float32, torch.device("meta"), comfy.ops.disable_weight_init
    )
    return encoder


def _clip_state(config_name: str, prefix: str, seed: int, suffix: str) -> StateDict:
    """CLIP as the file type stores it best. The projection is left out where real checkpoints have none."""
    encoder = _clip(config_name)
    state = _strided(encoder, prefix, seed) if suffix == ".ckpt" else _random(encoder, prefix, seed, "float8_e4m3fn")
    if prefix != CLIP_G_SDXL:
        state.pop(prefix + "text_projection.weight", None)
    return state


def _vae(scale: float, latent_channels: int = 4) -> StateDict:
    """TAESD whose decoder gives 0.5 with a deviation of 0.15 per channel on latents of deviation `1 / scale`.

    The decoder clamps its input at 3. Were the latents beyond that, pictures would hide what differs in them.
    """
    import torch
    from comfy.taesd.taesd import TAESD

    network = TAESD(latent_channels=latent_channels)
    state = _random(network, "", seed=2)
    state["vae_scale"] = torch.tensor(scale)
    network.load_state_dict({name: value.float() for name, value in state.items()})
    latents = torch.randn(1, latent_channels, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        picture = network.taesd_decoder(latents)
    gain = 0.15 / picture.std(dim=(0, 2, 3))
    last = f"taesd_decoder.{len(network.taesd_decoder) - 1}."
    state[last + "weight"] = (state[last + "weight"].float() * gain.view(3, 1, 1, 1)).half()
    state[last + "bias"] = (0.5 - picture.mean(dim=(0, 2, 3)) * gain).half()
    return {VAE_PREFIX + name: value for name, value in state.items()}


def sd15(path: Path) -> None:
    """SD1.5 with CLIP-L: 162 M parameters; 80 MB as `.ckpt`, 200 MB as `.safetensors`."""
    clip = _clip_state("sd1_clip_config.json", CLIP_L_SD15, 3, path.suffix)
    _save({**_random(_unet_sd15(), UNET_PREFIX, 1), **_vae(SCALE_SD15 / NOISE_SD15), **clip}, path)


def sdxl(path: Path) -> None:
    """KOALA, of the SDXL family, with CLIP-L and CLIP-G: 889 M parameters; 150 MB as `.ckpt`, 960 MB else."""
    clip_l = _clip_state("sd1_clip_config.json", CLIP_L_SDXL, 3, path.suffix)
    clip_g = _clip_state("clip_config_bigg.json", CLIP_G_SDXL, 4, path.suffix)
    _save({**_random(_unet_sdxl(), UNET_PREFIX, 1), **_vae(SCALE_SDXL / NOISE_SD15), **clip_l, **clip_g}, path)


def sd15_noclip(path: Path) -> None:
    """SD1.5 without a text encoder: 39 M parameters, 78 MB."""
    _save({**_random(_unet_sd15(), UNET_PREFIX, 1), **_vae(SCALE_SD15 / NOISE_SD15)}, path)


def sd15_small_noclip(path: Path) -> None:
    """The smallest SD1.5 there is, without a text encoder: 18 M parameters, 37 MB. For tests of everything else."""
    _save({**_random(_unet_sd15_small(), UNET_PREFIX, 1), **_vae(SCALE_SD15 / NOISE_SD15)}, path)


def sd15_inpaint_noclip(path: Path) -> None:
    """SD1.5 inpainting (9 input channels) without a text encoder: 39 M parameters, 78 MB."""
    _save({**_random(_unet_sd15(in_channels=9), UNET_PREFIX, 1), **_vae(SCALE_SD15 / NOISE_SD15)}, path)


def sdxl_noclip(path: Path) -> None:
    """KOALA, of the SDXL family, without text encoders: 71 M parameters, 142 MB."""
    _save({**_random(_unet_sdxl(), UNET_PREFIX, 1), **_vae(SCALE_SDXL / NOISE_SD15)}, path)


def sd3_noclip(path: Path) -> None:
    """SD3 with one block, without text encoders: 3 M parameters, 6.5 MB."""
    _save({**_random(_mmdit(), UNET_PREFIX, 5), **_vae(SCALE_SD3, latent_channels=16)}, path)


RECIPES: dict[str, Callable[[Path], None]] = {
    "tiny_sd15.ckpt": sd15,
    "tiny_sd15.safetensors": sd15,
    "tiny_sdxl.ckpt": sdxl,
    "tiny_sd15_noclip.safetensors": sd15_noclip,
    "tiny_sd15_small_noclip.safetensors": sd15_small_noclip,
    "tiny_sd15_inpaint_noclip.safetensors": sd15_inpaint_noclip,
    "tiny_sdxl_noclip.safetensors": sdxl_noclip,
    "tiny_sd3_noclip.safetensors": sd3_noclip,
}
"""Every file this program can make."""


def _save(state: StateDict, path: Path) -> None:
    """Write `state` in the format of `path`'s suffix, appearing under its name only when complete."""
    import torch
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        if path.suffix == ".ckpt":
            # through a handle: torch.save writes a path's name into the archive, and the bytes would differ
            with partial.open("wb") as file:
                torch.save(state, file)
        else:
            save_file(state, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    parameters = sum(value.numel() for value in state.values())
    print(f"{path.name}: {parameters / 1e6:.0f} M parameters, {path.stat().st_size / 1e6:.0f} MB", flush=True)


def ensure(comfyui: Path, cache: Path, names: Sequence[str]) -> Path:
    """Make the checkpoints `names` in a process of its own, unless `cache` already has them.

    Returns the folder they lie in, which is named after this file's digest: a changed recipe makes new files.
    Raises RuntimeError with the program's output.
    """
    source = Path(__file__).resolve()
    folder = cache / hashlib.sha256(source.read_bytes()).hexdigest()[:12]
    if any(not (folder / name).exists() for name in names):
        command = [sys.executable, str(source), "--comfyui", str(comfyui), str(folder), *names]
        done = subprocess.run(
            command, cwd=comfyui, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False
        )
        if done.returncode:
            raise RuntimeError(f"the tiny checkpoints could not be made:\n{done.stdout}{done.stderr}")
    return folder


def main() -> None:
    """Parse the command line and write what is missing."""
    parser = argparse.ArgumentParser(description="Make tiny random checkpoints that stock ComfyUI loaders detect.")
    parser.add_argument("--comfyui", type=Path, required=True, help="folder of ComfyUI")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=sorted(RECIPES), metavar="NAME")
    arguments = parser.parse_args()
    # this program's folder would let its siblings shadow top-level modules
    sys.path[0] = str(arguments.comfyui.resolve())
    from comfy.cli_args import args

    args.cpu = True  # must precede the import of comfy.model_management
    for name in arguments.names:
        path: Path = arguments.folder / name
        if not path.exists():
            RECIPES[name](path)


if __name__ == "__main__":
    main()
