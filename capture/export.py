"""The one capture: a network becomes a `torch.export` program with free batch, height, width and token count.

The trace runs on tiny tensors of our own: what it costs does not depend on the user's sizes, and the sizes are
distinct, odd and never 1, because `torch.export` bakes a size of 1 in and unites sizes that happen to be equal.

How far down the free sizes reach is a property of the network: where its smallest feature map would be one pixel
wide, `torch.export` records that it was not. So the least height and width are looked for on a ladder, see
`LEAST_SIZES`. How far up they reach is asked of the network itself, without computing anything, see `MOST_SIZES`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..backends.base import DimRange, InputProfile, ShapeProfile
from ..errors import CaptureError
from .attention import sdpa_override
from .measure import dtype_name, plain, psnr_db, takes_options

log = logging.getLogger("kitchen_accel.capture")

SIZE_NAMES = ("height", "width")
"""Dimensions that a network halves on its way down."""

LEAST_SIZES = (1, 2, 3, 5, 9, 17, 33)
"""Least height and width to try, in latent units: 1, then 2**n + 1, the least size that is still two pixels wide
after n halvings (each rounds up). The search begins at the rung of the halvings counted in one forward and goes up
while `torch.export` refuses."""

MOST_SIZES = (1024, 768, 512, 384, 256, 192, 128, 96, 64)
"""Greatest height and width to try, in latent units. Networks with a table of positions (SD3: 384, SD3.5: 768)
refuse more."""

TRACE_SIZES = {"batch": 2, "tokens": 7}
"""Sizes traced for dimensions that no network halves. Any other free dimension is traced at 5."""

PROOF_DB = {"float32": 90.0, "bfloat16": 30.0, "float16": 40.0}
"""How near, in dB PSNR, the program must come to the network when both run in PyTorch, by the output's dtype.
They run the same operators, and differ by the attention the network uses without ours: in fp32 that measured 120 dB
and more."""

NEXT_STEP = "choose the backend cuda for this model, and report the network's class"


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """A network as a program.

    program: the `torch.export.ExportedProgram`. Its weights *are* the module's tensors. Its graph inputs are
        `input_names`, in this order; its one output is the network's.
    profile: the shapes the program accepts; never wider than the profile that was asked for.
    """

    program: Any
    input_names: tuple[str, ...]
    profile: ShapeProfile


def capture(
    module: Any,
    example: Mapping[str, Any],
    profile: ShapeProfile,
    attention: Callable[..., Any] | None = None,
) -> CapturedProgram:
    """Capture `module`, for every shape in `profile` or as many of them as the network allows.

    module: a `torch.nn.Module` in eval mode, called with keywords. Not changed.
    example: the caller's tensors by name. Only their names, dtypes and device are read.
    profile: what to ask for: one input per tensor in `example`. Only `height` and `width` may get narrower.
    attention: stands in for the network's attention, called as ComfyUI calls an attention override (see
        `sdpa_override`, which is the default).

    The result was run beside the network at sizes other than the traced ones.
    Raises CaptureError, naming the part of the network that failed when it can be known.
    """
    import torch

    names = tuple(i.name for i in profile.inputs)
    if set(names) != set(example):
        raise CaptureError(
            "the example's tensors are not the profile's inputs",
            got=", ".join(sorted(example)),
            allowed=", ".join(names),
            next_step="report this, it is a fault of this pack",
        )
    if module.training:
        raise CaptureError(
            "the network is in training mode", got="training", allowed="eval", next_step="call module.eval() first"
        )
    device = next(iter(example.values())).device
    network = _wrap(module, attention or sdpa_override)
    with torch.no_grad():
        halvings = _halvings(network, profile, device)
        asked = _bounded_above(network, profile)
        return _climb(network, asked, halvings, device)


def _climb(network: Any, profile: ShapeProfile, halvings: int, device: Any) -> CapturedProgram:
    """Export with ever greater least sizes until one is accepted and proven."""
    reason = ""
    for least in LEAST_SIZES[min(halvings + 1, len(LEAST_SIZES) - 1) if halvings else 0 :]:
        candidate = _with_sizes(profile, least=least)
        if any(d.min > d.max for d in _free(candidate)):
            break
        try:
            program = _export(network, candidate, halvings, device)
        except Exception as error:  # torch.export lets whatever a forward raises through
            if not _refuses_sizes(error):
                raise _explain(error, network) from error
            reason = reason or _first_line(error)
            log.debug("heights and widths from %d refused: %s", least, _first_line(error))
            continue
        refused = _proof(network, program, candidate, device)
        if not refused:
            return CapturedProgram(program, _input_names(program, candidate), candidate)
        reason = reason or refused
        log.debug("heights and widths from %d not proven: %s", least, refused)
    raise CaptureError(
        "no range of heights and widths could be captured",
        got=reason or None,
        allowed=f"free sizes from one of {LEAST_SIZES} latent pixels up, within the profile asked for",
        next_step=NEXT_STEP,
    )


def _wrap(module: Any, attention: Callable[..., Any]) -> Any:
    """`module` as a network of one argument, a dictionary of tensors, with our attention inside."""
    import torch

    options = {"transformer_options": {"optimized_attention_override": attention}} if takes_options(module) else {}

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = module

        def forward(self, inputs: dict[str, Any]) -> Any:
            batches = [t.shape[0] for t in inputs.values()]
            for size in batches[1:]:
                # said at the start, one symbol stands for all of them and every later expression stays simple
                torch._check(size == batches[0])
            return self.network(**inputs, **{name: dict(value) for name, value in options.items()})

    return Network().eval()


def _export(network: Any, profile: ShapeProfile, halvings: int, device: Any) -> Any:
    import torch

    dims: dict[str, Any] = {}
    for dim in _free(profile):
        if dim.multiple == 1:
            dims[dim.name] = torch.export.Dim(dim.name, min=dim.min, max=dim.max)
        else:
            part = torch.export.Dim(f"{dim.name}_part", min=dim.min // dim.multiple, max=dim.max // dim.multiple)
            dims[dim.name] = dim.multiple * part
    shapes = {
        i.name: {axis: dims[d.name] for axis, d in enumerate(i.dims) if isinstance(d, DimRange)} for i in profile.inputs
    }
    sizes = _trace_sizes(profile, halvings)
    return torch.export.export(
        network, (_tensors(profile, sizes, device),), dynamic_shapes={"inputs": shapes}, strict=False
    )


def _free(profile: ShapeProfile) -> tuple[DimRange, ...]:
    """The profile's free dimensions, one of each name."""
    return tuple({d.name: d for i in profile.inputs for d in i.dims if isinstance(d, DimRange)}.values())


def _fit(size: int, dim: DimRange) -> int:
    """The least size `dim` accepts from `size` up, or its greatest."""
    up = math.ceil(max(size, dim.min) / dim.multiple) * dim.multiple
    return min(up, dim.max // dim.multiple * dim.multiple)


def _trace_sizes(profile: ShapeProfile, halvings: int) -> dict[str, int]:
    """Sizes to trace at: at the bottom of the network 3 and 4 pixels, odd at the top."""
    step = 2**halvings
    wanted = {**TRACE_SIZES, "height": 2 * step + 1, "width": 3 * step + (3 if step > 1 else 2)}
    return {d.name: _fit(wanted.get(d.name, 5), d) for d in _free(profile)}


def _tensors(profile: ShapeProfile, sizes: Mapping[str, int], device: Any) -> dict[str, Any]:
    """Random tensors of these sizes, in the profile's dtypes. `(N,)` is a time in [0, 1)."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def one(spec: InputProfile) -> Any:
        shape = [sizes[d.name] if isinstance(d, DimRange) else d for d in spec.dims]
        dtype = getattr(torch, spec.dtype)
        make = torch.rand if len(shape) == 1 else torch.randn
        return make(shape, generator=generator).to(device=device, dtype=dtype)

    return {i.name: one(i) for i in profile.inputs}


def _halvings(network: Any, profile: ShapeProfile, device: Any) -> int:
    """How often the network halves the image on its way down, counted on one small forward."""
    import torch

    free = {d.name: d for d in _free(profile)}
    if "height" not in free:
        return 0
    sizes = {name: _fit(TRACE_SIZES.get(name, 64 if name in SIZE_NAMES else 5), dim) for name, dim in free.items()}
    smallest = [sizes["height"]]

    def look(_module: Any, _args: Any, out: Any) -> None:
        if out.ndim == 4:
            smallest[0] = min(smallest[0], out.shape[2])

    hooks = [m.register_forward_hook(look) for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    try:
        network(_tensors(profile, sizes, device))
    except Exception as error:
        raise _explain(error, network) from error
    finally:
        for hook in hooks:
            hook.remove()
    return max(0, round(math.log2(sizes["height"] / smallest[0])))


def _bounded_above(network: Any, profile: ShapeProfile) -> ShapeProfile:
    """`profile` with heights and widths no greater than the network itself accepts.

    Asked on fake tensors: shapes are followed, nothing is computed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    limits = [d.max for d in _free(profile) if d.name in SIZE_NAMES]
    if not limits:
        return profile
    device = next((p.device for p in network.parameters()), "cpu")
    first: Exception | None = None
    for most in (max(limits), *(m for m in MOST_SIZES if m < max(limits))):
        candidate = _with_sizes(profile, most=most)
        sizes = {
            d.name: _fit(d.max if d.name in SIZE_NAMES else TRACE_SIZES.get(d.name, 5), d) for d in _free(candidate)
        }
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                network(_tensors(candidate, sizes, device))
        except Exception as error:
            first = first or error
            continue
        return candidate
    raise _explain(first or RuntimeError("no size is small enough"), network) from first


def _with_sizes(profile: ShapeProfile, *, least: int = 1, most: int | None = None) -> ShapeProfile:
    """`profile` with its heights and widths cut to `least` and `most`, rounded inwards to their multiples."""

    def cut(dim: int | DimRange) -> int | DimRange:
        if isinstance(dim, int) or dim.name not in SIZE_NAMES:
            return dim
        low = math.ceil(max(dim.min, least) / dim.multiple) * dim.multiple
        high = min(dim.max, most or dim.max) // dim.multiple * dim.multiple
        return replace(dim, min=low, max=high)

    return ShapeProfile(tuple(replace(i, dims=tuple(map(cut, i.dims))) for i in profile.inputs))


def _input_names(program: Any, profile: ShapeProfile) -> tuple[str, ...]:
    """The profile's names in the order of the program's own inputs, which it calls `inputs_<name>`."""
    by_graph_name = {f"inputs_{i.name}": i.name for i in profile.inputs}
    return tuple(by_graph_name[name] for name in program.graph_signature.user_inputs)


def _proof(network: Any, program: Any, profile: ShapeProfile, device: Any) -> str:
    """Run the program beside the network where it was not traced. Empty when they agree, else the reason.

    At the least of everything, and at batch 3 with an oblong image and two CLIP chunks of tokens.
    """
    run = program.module()
    free = _free(profile)
    least = {d.name: _fit(1, d) for d in free}
    other = {"batch": 3, "height": least.get("height", 1) + 4, "width": least.get("width", 1) + 8, "tokens": 154}
    for sizes in (least, {d.name: _fit(other.get(d.name, 6), d) for d in free}):
        tensors = _tensors(profile, sizes, device)
        where = ", ".join(f"{name} {size}" for name, size in sizes.items())
        try:
            want = plain(network.network)(tensors)
            got = run(tensors)
        except (AssertionError, RuntimeError, ValueError) as error:
            return f"at {where}: {_first_line(error)}"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"at {where}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        found, needed = psnr_db(got, want), PROOF_DB.get(dtype_name(want), 90.0)
        if not found >= needed:
            return f"at {where}: {found:.1f} dB PSNR instead of {needed:.1f}"
    return ""


def _refuses_sizes(error: Exception) -> bool:
    """Does torch.export refuse this range of heights or widths, rather than the network?"""
    from torch._dynamo.exc import UserError

    line = _first_line(error)
    return isinstance(error, UserError) and "onstraint" in line and any(name in line for name in SIZE_NAMES)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0].strip()}" if text else type(error).__name__


def _explain(error: Exception, network: Any) -> CaptureError:
    """A CaptureError with the innermost part of the network that was running when `error` was raised."""
    import torch

    names = {id(m): name.removeprefix("network.") for name, m in network.named_modules()}
    part = ""
    frame = error.__traceback__
    while frame is not None:
        owner = frame.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module) and names.get(id(owner)):
            part = f"{names[id(owner)]} ({type(owner).__name__})"
        frame = frame.tb_next
    return CaptureError(
        f"the network could not be captured{f', in its part {part}' if part else ''}",
        got=_first_line(error),
        next_step=NEXT_STEP,
    )
