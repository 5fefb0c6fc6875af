"""PNG bytes as arrays, and how alike two pictures are."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import Any

IDENTICAL_DB = 999.0
"""PSNR of two equal pictures: infinity, as a number that JSON can hold."""


@dataclass(frozen=True, slots=True)
class Similarity:
    """psnr_db: peak signal-to-noise ratio over 8-bit channels, `IDENTICAL_DB` for equal pictures.

    ssim: structural similarity, 1.0 for equal pictures. max_levels: largest difference of one channel, 0 to 255.
    """

    psnr_db: float
    ssim: float
    max_levels: int


def pixels(png: bytes) -> Any:
    """The picture as a numpy array `(height, width, 3)`, uint8."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(png)) as image:
        return np.asarray(image.convert("RGB"))


def compare(reference: bytes, other: bytes) -> Similarity:
    """Similarity of two PNG files. Raises ValueError when their sizes differ."""
    import numpy as np
    from skimage import metrics

    measures: Any = metrics  # scikit-image ships no types for these
    a, b = pixels(reference), pixels(other)
    if a.shape != b.shape:
        raise ValueError(f"the pictures differ in size: {a.shape[1]}x{a.shape[0]} and {b.shape[1]}x{b.shape[0]} pixels")
    worst = int(np.abs(a.astype(np.int16) - b.astype(np.int16)).max())
    if worst == 0:
        return Similarity(IDENTICAL_DB, 1.0, 0)
    psnr = float(measures.peak_signal_noise_ratio(a, b, data_range=255))
    ssim = float(measures.structural_similarity(a, b, channel_axis=2, data_range=255))
    return Similarity(IDENTICAL_DB if math.isinf(psnr) else psnr, ssim, worst)


def side_by_side(left: bytes, right: bytes, gap: int = 8) -> bytes:
    """One PNG with both pictures, `gap` pixels apart, and their difference times 16 as a third."""
    import numpy as np
    from PIL import Image

    a, b = pixels(left), pixels(right)
    difference = np.abs(a.astype(np.int16) - b.astype(np.int16)) * 16
    white = np.full((a.shape[0], gap, 3), 255, dtype=np.uint8)
    joined = np.concatenate([a, white, b, white, difference.clip(0, 255).astype(np.uint8)], axis=1)
    out = io.BytesIO()
    Image.fromarray(joined).save(out, format="PNG")
    return out.getvalue()
