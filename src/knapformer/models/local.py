"""Attention on one device without torch.distributed: each sequence attends to itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from knapformer.errors import LengthsError
from knapformer.models.layers import Attention


def local_attention(lengths: Sequence[int]) -> Attention:
    """Attention over whole sequences that lie one after another in packed order.

    Args:
        lengths: tokens of each sequence (text and visual together); zeros are allowed.

    Returns:
        The ``attention`` argument of a model. It raises ``LengthsError`` if its rows are not the lengths' sum.
    """
    lengths = [int(length) for length in lengths]

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        if q.shape[0] != sum(lengths):
            raise LengthsError(f"the lengths sum to {sum(lengths)} tokens, got {q.shape[0]} rows of queries")
        # Without any token the empty rows are attended to all the same, which keeps q, k and v in the graph.
        kept = [length for length in lengths if length] or [0]
        parts = zip(q.split(kept), k.split(kept), v.split(kept), strict=True)
        return torch.cat([_attend(*part, scale=scale, causal=causal) for part in parts])

    return attention


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool) -> Tensor:
    """q (L, H, D), k and v (L, Hkv, D) to (L, H, D)."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)
