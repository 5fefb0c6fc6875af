"""Which compiled form of one program serves a call, for backends that can compile it for fixed shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of one call's inputs, in the profile's order."""

Variant = Literal["static", "dynamic"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive calls with the same shapes."""

    shapes: Shapes
    calls: int


@dataclass(frozen=True, slots=True)
class Choice:
    """How to serve a call. evict: the static network that must go first, or None."""

    variant: Variant
    evict: Shapes | None = None


RETURNS, LONG_CALLS, HISTORY = 2, 64, 64
"""See `choose_variant`. 64 calls are two to three prompts; the history is in stretches."""


def choose_variant(
    mode: str,
    shapes: Shapes,
    *,
    history: Sequence[Stretch],
    live: Sequence[Shapes],
    compiled: Mapping[Shapes, int],
    slots: int,
) -> Choice:
    """Which compiled network serves a call with `shapes`. Pure.

    mode: `static`, `dynamic`, or `auto`: static in a free slot. With all slots taken, a shape replaces the static
        network unused for longest when, since that one's last use, it has come in `RETURNS` separate stretches or in
        `LONG_CALLS` calls; each earlier compilation of the shape doubles both. So shapes that alternate, but do not
        fit the slots, are served by the dynamic network instead of being compiled again and again.
    history: oldest first, this call included. live: static networks there are, the one unused for longest first.
    compiled: how often each shape was compiled statically. slots: static networks allowed, at least 1.
    """
    if mode == "dynamic":
        return Choice("dynamic")
    if shapes in live:
        return Choice("static")
    if len(live) < slots:
        return Choice("static")
    oldest = live[0]
    if mode == "static":
        return Choice("static", evict=oldest)
    since: list[Stretch] = []
    for stretch in reversed(history):
        if stretch.shapes == oldest:
            break
        since.append(stretch)
    own = [stretch.calls for stretch in since if stretch.shapes == shapes]
    patience = 2 ** min(compiled.get(shapes, 0), 30)
    if len(own) >= RETURNS * patience or sum(own) >= LONG_CALLS * patience:
        return Choice("static", evict=oldest)
    return Choice("dynamic")
