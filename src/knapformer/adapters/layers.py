"""Packed forwards of the layers that several diffusers models share.

Each takes the place of ``forward`` on an instance: ``self`` is diffusers' module, and all its submodules are called as
modules, so that LoRA layers and hooks keep working. Tokens are packed rows (T, C); conditioning is (S, C) with an index
(T,) from token to row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from knapformer.adapters.packing import Packed, Rotate
from knapformer.execution.rows import RowIndex, add_gated, modulate

HALF_MAX = 65504
EXCLUDED_SCORE = -4_000.0
"""Score of a text key in attention among visual tokens only: its weight is exactly 0, and float16 can hold it."""


def ada_zero(self: Any, x: Tensor, emb: Tensor, index: RowIndex) -> tuple[Tensor, ...]:
    """AdaLayerNormZero: modulated x, gate of attention, shift, scale and gate of the MLP."""
    shift, scale, *rest = self.linear(self.silu(emb)).chunk(6, dim=1)
    return modulate(self.norm(x), shift, scale, index), *rest


def ada_zero_dual(self: Any, x: Tensor, emb: Tensor, index: RowIndex) -> tuple[Tensor, ...]:
    """SD35AdaLayerNormZeroX: as ``ada_zero``, then x modulated for the second attention, and its gate."""
    parts = self.linear(self.silu(emb)).chunk(9, dim=1)
    normed = self.norm(x)
    second = modulate(normed, parts[6], parts[7], index)
    return modulate(normed, parts[0], parts[1], index), *parts[2:6], second, parts[8]


def ada_single(self: Any, x: Tensor, emb: Tensor, index: RowIndex) -> tuple[Tensor, Tensor]:
    """AdaLayerNormZeroSingle: modulated x, gate."""
    shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
    return modulate(self.norm(x), shift, scale, index), gate


def ada_continuous(self: Any, x: Tensor, emb: Tensor, index: RowIndex) -> Tensor:
    """AdaLayerNormContinuous: modulated x."""
    scale, shift = self.linear(self.silu(emb).to(x.dtype)).chunk(2, dim=1)
    return modulate(self.norm(x), shift, scale, index)


def rotation(cos: Tensor, sin: Tensor) -> Rotate:
    """Rotate pairs of channels of (T, H, D) by diffusers' tables (T, D), as its ``apply_rotary_emb`` does."""

    def rotate(x: Tensor) -> Tensor:
        real, imaginary = x.unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
        turned = torch.stack([-imaginary, real], dim=-1).flatten(-2)
        # In here: a compiler takes a size of its inputs for one that may change, and heads could not be broadcast.
        return (x.float() * cos.unsqueeze(1) + turned.float() * sin.unsqueeze(1)).to(x.dtype)

    return rotate


def feed_forward(x: Tensor, parts: tuple[Tensor, ...], norm: Any, mlp: Any, index: RowIndex) -> Tensor:
    """``x + gate · mlp(modulated norm(x))`` with ``parts`` shift, scale and gate (S, C)."""
    shift, scale, gate = parts
    return add_gated(x, mlp(modulate(norm(x), shift, scale, index)), gate, index)


def clip_half(x: Tensor) -> Tensor:
    """Keep float16 finite, as diffusers does."""
    return x.clip(-HALF_MAX, HALF_MAX) if x.dtype == torch.float16 else x


def project(attn: Any, x: Tensor, *, added: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(T, C) to q, k, v (T, H, D), q and k normed; ``added`` takes the text stream's layers."""
    names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
    q, k, v = (getattr(attn, name)(x).unflatten(-1, (attn.heads, -1)) for name in names)
    q_norm, k_norm = ("norm_added_q", "norm_added_k") if added else ("norm_q", "norm_k")
    return _normed(attn, q_norm, q), _normed(attn, k_norm, k), v


def _normed(attn: Any, name: str, x: Tensor) -> Tensor:
    norm = getattr(attn, name, None)
    normed: Tensor = x if norm is None else norm(x)
    return normed


def attention(self: Any, x: Tensor, text: Tensor | None, packed: Packed) -> Any:
    """FluxAttention and Attention.

    With text (T_text, C), x is (T_visual, C) and both come back, text None where the layer has no output for it;
    without, x is (T, C) of all tokens.
    """
    if text is None:
        return _project_out(self, packed.attention(*project(self, x)))
    pairs = zip(project(self, text, added=True), project(self, x), strict=True)
    out = packed.attention(*(packed.merge(*pair) for pair in pairs))
    text_out, visual_out = packed.split(out)
    to_add_out = getattr(self, "to_add_out", None)
    return _project_out(self, visual_out), None if to_add_out is None else to_add_out(text_out)


def visual_attention(attn: Any, x: Tensor, packed: Packed) -> Tensor:
    """Attention of (T_visual, C) among the visual tokens alone.

    Where no sequence is split, nothing is exchanged, and the text is left out. Elsewhere the plan splits text and all,
    so text tokens take part with zero queries and values, and with keys that one more head channel gives a score whose
    softmax weight is exactly 0. Heads are widened by 8 channels (kernels want multiples of 8).
    """
    q, k, v = project(attn, x)
    if packed.visual_attention is not None:
        return _project_out(attn, packed.visual_attention(q.to(v.dtype), k.to(v.dtype), v).flatten(1))
    scale = q.shape[-1] ** -0.5
    num_text = packed.text.rows.shape[0]
    flag = q.new_zeros(8)
    flag[0] = 1.0
    q = torch.cat([q, flag.expand(*q.shape[:2], 8)], dim=-1)
    k, v = (functional.pad(part, (0, 8)) for part in (k, v))
    text_k = k.new_zeros(num_text, *k.shape[1:])
    text_k[..., -8] = EXCLUDED_SCORE / scale
    none = q.new_zeros(num_text, *q.shape[1:])
    text_q = torch.cat([none[..., :-8], flag.expand(num_text, q.shape[1], 8)], dim=-1)
    merged = (packed.merge(*pair).to(v.dtype) for pair in ((text_q, q), (text_k, k), (none, v)))
    out: Tensor = packed.step.attention(*merged, scale=scale)
    visual: Tensor = packed.split(out)[1][..., :-8].flatten(1)
    return _project_out(attn, visual)


def _project_out(attn: Any, x: Tensor) -> Tensor:
    layers = getattr(attn, "to_out", None)
    if layers is not None:
        for layer in layers:
            x = layer(x)
    return x


def patch_convolution(self: Any, patches: Tensor) -> Tensor:
    """Conv2d or Conv3d whose kernel is its stride, on single patches (T, C, *patch): one matrix product.

    Returns:
        (T, width, 1, …) as the convolution would.
    """
    out = functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)
    return out.reshape(*out.shape, *(1,) * (patches.ndim - 2))
