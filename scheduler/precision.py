"""Which precision an engine computes in, as pure functions of what was asked for and what was measured."""

from __future__ import annotations

import math

from ..backends.base import PRECISIONS, Measurement, Precision, Refusal
from .policy import PrecisionWish, Thresholds

PRECISION_OF_DTYPE: tuple[tuple[str, Precision], ...] = (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"))


def usable(measurement: Measurement) -> bool:
    """Whether both times are positive and finite: a manifest is a file, and a file can hold anything."""
    return all(math.isfinite(s) and s > 0 for s in (measurement.step_s, measurement.torch_step_s))


def passes(measurement: Measurement, thresholds: Thresholds) -> bool:
    """Whether its PSNR reaches the threshold of its precision. Not a number never passes."""
    needed = dict(thresholds).get(measurement.precision)
    return needed is not None and measurement.psnr_db >= needed


def quickest(measurements: tuple[Measurement, ...], precision: Precision | None = None) -> Measurement | None:
    """The usable one with the lowest `step_s`, of one precision or of all; the first of equals."""
    found = [m for m in measurements if usable(m) and precision in (None, m.precision)]
    return min(found, key=lambda m: m.step_s, default=None)


def choose_precision(
    wanted: PrecisionWish,
    compute_dtype: str,
    device_precisions: tuple[Precision, ...],
    measurements: tuple[Measurement, ...],
    thresholds: Thresholds,
) -> tuple[Precision, str] | Refusal:
    """The precision to compute in and why, or the Refusal `precision` when the device cannot do what was asked.

    wanted: `auto` keeps `compute_dtype`, or takes fp32 where the device lacks it; `fast` takes the quickest measured
        one that passes its threshold, else what `auto` takes; anything else is taken as it is.
    compute_dtype: dtype stock ComfyUI would compute in, e.g. `"float32"`.
    device_precisions: what the device computes in natively.
    """
    offered = ", ".join(device_precisions) or "none"
    if wanted not in ("auto", "fast"):
        if wanted in device_precisions:
            return wanted, f"{wanted} was asked for"
        return Refusal(
            "precision", "precision", f"{wanted} was asked for", f"one the device offers: {offered}", "precision: auto"
        )
    automatic = _automatic(compute_dtype, device_precisions, offered)
    if wanted == "auto":
        return automatic
    best = quickest(tuple(m for m in measurements if m.precision in device_precisions and passes(m, thresholds)))
    if best is not None:
        needed = dict(thresholds)[best.precision]
        return best.precision, (
            f"{best.precision} is the quickest measured precision that is right: {milliseconds(best.step_s)} a step, "
            f"PSNR {best.psnr_db:.1f} dB, threshold {needed:.1f} dB"
        )
    if isinstance(automatic, Refusal):
        return automatic
    precision, why = automatic
    missing = "no measured precision reaches its threshold" if measurements else "nothing is measured yet"
    return precision, f"fast was asked for but {missing}; {why}"


def _automatic(
    compute_dtype: str, device_precisions: tuple[Precision, ...], offered: str
) -> tuple[Precision, str] | Refusal:
    stock = dict(PRECISION_OF_DTYPE).get(compute_dtype)
    if stock is None:
        allowed = ", ".join(dtype for dtype, _ in PRECISION_OF_DTYPE)
        return Refusal("precision", "compute dtype of the model", compute_dtype, f"one of {allowed}")
    if stock in device_precisions:
        return stock, f"{stock} is what PyTorch would compute in"
    if "fp32" in device_precisions:
        return "fp32", f"fp32 because PyTorch would compute in {stock} and the device offers {offered}"
    return Refusal(
        "precision",
        "precision of the device",
        offered,
        f"{stock} or fp32, to keep what PyTorch computes",
        f"precision: {device_precisions[0]} accepts less" if device_precisions else "",
    )


def fast_offer(measurements: tuple[Measurement, ...], chosen: Precision, thresholds: Thresholds) -> str:
    """One sentence on what `precision: fast` would gain (ratio, ms) and cost (PSNR in dB), or why nothing."""
    now = quickest(measurements, chosen)
    if now is None:
        return f"precision: fast cannot be judged, {chosen} is not measured yet."
    others = [quickest(measurements, p) for p in PRECISIONS if p != chosen]
    faster = sorted((m for m in others if m is not None and m.step_s < now.step_s), key=lambda m: m.step_s)
    right = quickest(tuple(m for m in measurements if m.precision != chosen and passes(m, thresholds)))
    if right is not None and right.step_s < now.step_s:
        return (
            f"precision: fast would compute in {right.precision}, {now.step_s / right.step_s:.2f} times as fast "
            f"({milliseconds(right.step_s)} instead of {milliseconds(now.step_s)} a step), at a PSNR of "
            f"{right.psnr_db:.1f} dB instead of {now.psnr_db:.1f} dB "
            f"(threshold {dict(thresholds)[right.precision]:.1f} dB)."
        )
    if not faster:
        step = milliseconds(now.step_s)
        return f"precision: fast would gain nothing, {chosen} is the quickest measured ({step} a step)."
    failed = ", ".join(
        f"{m.precision} ({now.step_s / m.step_s:.2f} times as fast) reaches {m.psnr_db:.1f} dB, "
        + (f"needs {dict(thresholds)[m.precision]:.1f} dB" if m.precision in dict(thresholds) else "has no threshold")
        for m in faster
    )
    return f"precision: fast would change nothing, no quicker precision is right: {failed}."


def milliseconds(seconds: float) -> str:
    """`"12.34 ms"`."""
    return f"{seconds * 1000:.2f} ms"
