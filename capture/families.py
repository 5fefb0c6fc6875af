"""Which networks can be captured, as data, and the shapes an engine of theirs is asked to accept.

Pure: free of torch and of ComfyUI. Sizes of images are in latent units (one latent pixel is 8 image pixels
for every family listed here).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends.base import DimRange, InputProfile, ShapeProfile, TensorSpec
from ..errors import CaptureError

UNKNOWN = "unknown"
"""What `family_of` answers when no family fits."""

BATCH = DimRange("batch", 1, 64)
"""ComfyUI batches cond and uncond as memory allows, so one model is called with 1 to 2·batch_size rows."""

TOKENS = DimRange("tokens", 1, 4096)
"""CLIP prompts come in multiples of 77, T5 prompts at any length; ComfyUI repeats both to a common multiple."""


@dataclass(frozen=True, slots=True)
class FamilyInput:
    """One tensor input of a family.

    name: the keyword of the network's `forward`.
    dims: per dimension a range shared by all networks of the family, or None where each network has its own
        fixed size (channels, embedding width).
    optional: some networks of the family have no such input.
    """

    name: str
    dims: tuple[DimRange | None, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Networks with the same call.

    name: as in `ModelFacts.family`.
    classes: ends of the dotted class names that belong here, each beginning at a dot. The class itself, never a
        subclass: a subclass may do anything in its `forward`.
    inputs: tensor inputs in the order of an engine's inputs.
    inert_kwargs: further keywords ComfyUI may pass that this family's `forward` ignores (read in ComfyUI 0.3.64,
        0.3.75, 0.18.1 and 0.33.0); every other one changes the result and is no engine's business.
    """

    name: str
    classes: tuple[str, ...]
    inputs: tuple[FamilyInput, ...]
    inert_kwargs: tuple[str, ...] = ()

    def input(self, name: str) -> FamilyInput | None:
        return next((i for i in self.inputs if i.name == name), None)


def _size(name: str, *, multiple: int = 1) -> DimRange:
    # 1024 latent units are 8192 image pixels, ComfyUI's own MAX_RESOLUTION is 16384
    return DimRange(name, multiple, 1024, multiple)


def _image_inputs(*, multiple: int) -> tuple[FamilyInput, ...]:
    return (
        FamilyInput("x", (BATCH, None, _size("height", multiple=multiple), _size("width", multiple=multiple))),
        FamilyInput("timesteps", (BATCH,)),
        FamilyInput("context", (BATCH, TOKENS, None)),
        FamilyInput("y", (BATCH, None), optional=True),
    )


FAMILIES: tuple[Family, ...] = (
    # SD 1.x, 2.x, SDXL, their refiners and inpainting networks: any height and width, odd ones too
    Family(
        "unet",
        ("ldm.modules.diffusionmodules.openaimodel.UNetModel",),
        _image_inputs(multiple=1),
        inert_kwargs=("crossattn_controlnet",),
    ),
    # SD3, SD3.5: the network pads odd sizes to its patch of 2, in a branch that a capture cannot hold both sides of
    Family(
        "mmdit",
        ("ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",),
        _image_inputs(multiple=2),
        inert_kwargs=("crossattn_controlnet",),
    ),
)
"""All families, in the order reports list them."""


def family_of(class_name: str) -> str:
    """The family of a network's class, `"unknown"` when none fits.

    class_name: full dotted name, e.g. `"comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel"`.
    """
    for family in FAMILIES:
        if any(class_name == end or class_name.endswith("." + end) for end in family.classes):
            return family.name
    return UNKNOWN


def family(name: str) -> Family:
    """The table's row called `name`. Raises CaptureError when there is none."""
    for row in FAMILIES:
        if row.name == name:
            return row
    raise CaptureError(
        "this network's family cannot be captured",
        got=name,
        allowed=", ".join(row.name for row in FAMILIES),
        next_step="choose the backend cuda for this model",
    )


def requested_profile(family_name: str, tensors: tuple[TensorSpec, ...]) -> ShapeProfile:
    """The widest profile to ask a capture for, around one call.

    Equal for any two calls of one network: batch, height, width and tokens become the family's ranges, only
    channels, embedding widths, dtypes and the set of inputs come from the call. A capture may have to narrow it.

    Raises CaptureError when the call's inputs are not the family's.
    """
    row = family(family_name)
    given = {t.name: t for t in tensors}
    known = [i.name for i in row.inputs]
    extra = sorted(given.keys() - set(known))
    missing = [i.name for i in row.inputs if not i.optional and i.name not in given]
    if extra or missing:
        raise CaptureError(
            f"the call's inputs are not those of the family {row.name}",
            got=", ".join(sorted(given)),
            allowed=", ".join(f"{i.name} (optional)" if i.optional else i.name for i in row.inputs),
            next_step="choose the backend cuda for this model",
        )
    return ShapeProfile(tuple(_profile_of(i, given[i.name]) for i in row.inputs if i.name in given))


def _profile_of(want: FamilyInput, spec: TensorSpec) -> InputProfile:
    if len(spec.shape) != len(want.dims):
        raise CaptureError(
            f"input {want.name} has the wrong number of dimensions",
            got=f"{len(spec.shape)}, shape {spec.shape}",
            allowed=str(len(want.dims)),
            next_step="choose the backend cuda for this model",
        )
    dims = tuple(size if dim is None else dim for size, dim in zip(spec.shape, want.dims, strict=True))
    return InputProfile(want.name, spec.dtype, dims)
