"""Attention as one operator, for networks while they are captured.

ComfyUI picks its attention by device, flags and free memory, and its default on a CPU reads the free memory and
loops over chunks: none of that belongs into a program that runs later and elsewhere. ComfyUI 0.3.64 and newer
ask `transformer_options["optimized_attention_override"]` instead, when it is there; this is what we put there.
"""

from __future__ import annotations

from typing import Any


def sdpa_override(
    original: Any,
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: Any = None,
    attn_precision: Any = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **kwargs: Any,
) -> Any:
    """`torch.nn.functional.scaled_dot_product_attention` behind ComfyUI's call of an attention override.

    original: the attention function ComfyUI would have called; unused.
    q, k, v: `(N, T, heads·D)` or `(N, T, heads, D)`; with `skip_reshape` `(N, heads, T, D)`.
    mask: None, or `(T, S)`, `(N, T, S)`, `(N, heads, T, S)`: bool (True = attend) or added to the scores.
    attn_precision: ignored, as ComfyUI's own `attention_pytorch` does: the operator accumulates in fp32.
    kwargs: `scale` and `enable_gqa` (ComfyUI 0.33) are honoured; the rest (`transformer_options`,
        `low_precision_attention`, ...) does not change the result.

    Returns `(N, T, heads·D)`, or `(N, heads, T, D)` with `skip_output_reshape`.
    """
    from torch.nn.functional import scaled_dot_product_attention

    grouped = bool(kwargs.get("enable_gqa", False))
    if not skip_reshape:
        width = q.shape[-1] // heads if q.ndim == 3 else q.shape[-1]
        # heads are counted per tensor: with grouped queries, keys and values have fewer; SD3 hands k and v over split
        q, k, v = (
            (t if t.ndim == 4 else t.reshape(t.shape[0], t.shape[1], t.shape[-1] // width, width)).transpose(1, 2)
            for t in (q, k, v)
        )
    if mask is not None:
        if mask.ndim == 2:
            mask = mask.unsqueeze(0)
        if mask.ndim == 3:
            mask = mask.unsqueeze(1)
    extra: dict[str, Any] = {"enable_gqa": True} if grouped else {}
    if kwargs.get("scale") is not None:
        extra["scale"] = kwargs["scale"]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, **extra)
    if skip_output_reshape:
        return out
    return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], out.shape[1] * out.shape[3])
