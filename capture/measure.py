"""A new engine beside the network it was built from: is it right, and is it faster. For every backend's `build`."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from ..backends.base import DimRange, Engine, Measurement, Precision, ShapeProfile, TensorSpec
from ..errors import BuildError, EngineError

LEAST_FP32_DB = {"float32": 60.0, "float16": 40.0, "bfloat16": 30.0}
"""Least PSNR in dB of an engine that computes in fp32, by the dtype of the network's own output: the default
thresholds of the YAML. Measured with OpenVINO on ComfyUI's UNet and MMDiT in fp32: 110 dB and more."""

ROUNDS, SECONDS = 3, 20.0
"""Timed pairs of calls (PyTorch, engine) of each way to run; no further pair begins after these seconds."""


def measure(
    module: Any,
    load: Callable[[Precision, str], Engine],
    ways: tuple[tuple[Precision, str], ...],
    example: Mapping[str, Any],
    profile: ShapeProfile,
    progress: Callable[[float], None],
) -> tuple[tuple[Measurement, ...], dict[str, str]]:
    """Run every way of an engine beside the network, on the same inputs, in this process.

    module: the network, which is called as ComfyUI calls it, with the attention of its own.
    load: the engine in a precision and variant. ways: what to measure, in this order.
    example: the inputs; replaced by random ones of the nearest shapes where `profile` does not cover them.
    progress: called with a fraction in [0, 1].

    Returns the measurements, and notes: seconds to compile, and why a way could not be measured.
    Raises BuildError when fp32 fails or differs from the network by more than `LEAST_FP32_DB` allows.
    """
    import torch

    example = nearest(example, profile)
    run = plain(module)
    with torch.no_grad():
        want = run(example)
    if not bool(torch.isfinite(want).all()):
        raise BuildError(
            "the network's own output is not finite, so no engine can be compared with it",
            next_step="check the checkpoint, or run it in fp32",
        )
    needed = LEAST_FP32_DB.get(dtype_name(want), 60.0)
    found: list[Measurement] = []
    notes: dict[str, str] = {}
    for done, (precision, variant) in enumerate(ways):
        progress(done / len(ways))
        try:
            with closing(load(precision, variant)) as engine:
                began = time.perf_counter()
                engine.prepare(specs(example))
                notes[f"compile_{precision}_{variant}_s"] = f"{time.perf_counter() - began:.2f}"
                measured = _beside(run, engine, example, want, precision, variant)
        except EngineError as error:
            if precision == "fp32":
                raise BuildError(f"the new engine does not run: {error}", next_step="report this") from error
            notes[f"failed_{precision}_{variant}"] = str(error)
            continue
        if precision == "fp32" and not measured.psnr_db >= needed:
            raise BuildError(
                f"the {variant} engine computes something else than the network, in fp32",
                got=f"{measured.psnr_db:.1f} dB PSNR",
                allowed=f"{needed:.0f} dB or more",
                next_step="choose the backend cuda for this model, and report the network's class",
            )
        found.append(measured)
    return tuple(found), notes


def _beside(
    run: Callable[[Mapping[str, Any]], Any],
    engine: Engine,
    example: Mapping[str, Any],
    want: Any,
    precision: Precision,
    variant: str,
) -> Measurement:
    """One comparison, which also warms the engine up, then both in turn."""
    import torch

    psnr = psnr_db(engine.run(example), want)
    theirs: list[float] = []
    ours: list[float] = []
    ends = time.perf_counter() + SECONDS
    while len(ours) < ROUNDS and (not ours or time.perf_counter() < ends):
        at = time.perf_counter()
        with torch.no_grad():
            run(example)
        between = time.perf_counter()
        engine.run(example)
        theirs.append(between - at)
        ours.append(time.perf_counter() - between)
    return Measurement(precision, variant, round(psnr, 2), statistics.median(ours), statistics.median(theirs))


def plain(module: Any) -> Callable[[Mapping[str, Any]], Any]:
    """`module` as a function of its named tensors, with the attention of its own.

    ComfyUI's networks write into their `transformer_options`, whose default is one dictionary for all calls, so each
    call gets its own. A network without that argument is called without it.
    """
    options = {"transformer_options"} if takes_options(module) else set()
    return lambda inputs: module(**inputs, **{name: {} for name in options})


def takes_options(module: Any) -> bool:
    """Whether the network's `forward` has an argument `transformer_options`."""
    parameters = inspect.signature(module.forward).parameters.values()
    return any(p.name == "transformer_options" or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def psnr_db(got: Any, want: Any) -> float:
    """Peak signal-to-noise ratio of tensor `got` against `want`, in dB; the peak is the range of `want`.

    999.0 when they are equal; 0.0 when the shapes differ, when `got` is not finite, and when `want` is constant or
    not finite and `got` differs.
    """
    import torch

    if got.shape != want.shape:
        return 0.0
    got, want = got.detach().double(), want.detach().double()
    if torch.equal(got, want):
        return 999.0
    error = float(((got - want) ** 2).mean())
    peak = float(want.max() - want.min())
    if not math.isfinite(error) or not math.isfinite(peak) or peak == 0.0:
        return 0.0
    # two tensors may differ by less than a square can hold
    return min(999.0, 20 * math.log10(peak) - 10 * math.log10(error)) if error else 999.0


def nearest(example: Mapping[str, Any], profile: ShapeProfile) -> Mapping[str, Any]:
    """`example` when `profile` covers its shapes, else random tensors of the nearest shapes it covers."""
    import torch

    made: dict[str, Any] = {}
    fits = True
    for want in profile.inputs:
        tensor = example[want.name]
        shape = []
        for size, dim in zip(tensor.shape, want.dims, strict=True):
            if isinstance(dim, DimRange):
                near = max(dim.min, min(dim.max, size)) // dim.multiple * dim.multiple
                shape.append(near if near >= dim.min else near + dim.multiple)
            else:
                shape.append(dim)
        fits = fits and list(tensor.shape) == shape
        # [0, 1) is a valid time for every family, and an image as good as any
        made[want.name] = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    return example if fits else made


def dtype_name(tensor: Any) -> str:
    """`"float32"` for `torch.float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def specs(tensors: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Torch tensors by name, as values."""
    return tuple(TensorSpec(n, tuple(t.shape), dtype_name(t), str(t.device)) for n, t in tensors.items())
