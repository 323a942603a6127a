"""Attention on one device without torch.distributed: each sequence attends to itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from knapformer.errors import LengthsError
from knapformer.execution.kernels import varlen_attention
from knapformer.models.layers import Attention


def local_attention(lengths: Sequence[int]) -> Attention:
    """Attention over whole sequences that lie one after another in packed order.

    Args:
        lengths: tokens of each sequence (text and visual together); zeros are allowed.

    Returns:
        The ``attention`` argument of a model. It raises ``LengthsError`` if its rows are not the lengths' sum.
    """
    cu = [0, *accumulate(int(length) for length in lengths)]

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        if q.shape[0] != cu[-1]:
            raise LengthsError(f"the lengths sum to {cu[-1]} tokens, got {q.shape[0]} rows of queries")
        return varlen_attention(q, k, v, cu, cu, scale=scale, causal=causal)

    return attention
