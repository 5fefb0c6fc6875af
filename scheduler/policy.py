"""What the user wants, as far as a decision needs it. Filled from the settings and the node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..backends.base import BackendId, Precision

PrecisionWish = Literal["auto", "fast", "fp32", "bf16", "fp16"]
"""The YAML's `precision`."""

Thresholds = tuple[tuple[Precision, float], ...]
"""Lowest PSNR in dB that counts as right, per precision; sorted pairs. A precision not listed is never adopted."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One wish, for one model.

    wanted: the node's choice; `"auto"` means `default`. default: the YAML's `backend.default`.
    enabled: the YAML's `backend.enabled`; `cuda` need not be in it.
    fallback: what serves a call whose named backend is refused: `"cuda"`, or `"none"` to raise.
    precision: the YAML's `precision`. thresholds_db: the YAML's `parity`, in dB.
    openvino_device: the YAML's `openvino.device`, e.g. `"CPU"`, `"GPU"`, `"GPU.1"`, `"NPU"`.
    """

    wanted: BackendId | Literal["auto"]
    default: BackendId | Literal["auto"]
    enabled: tuple[BackendId, ...]
    fallback: Literal["cuda", "none"]
    precision: PrecisionWish
    thresholds_db: Thresholds
    openvino_device: str = "CPU"
