"""Attention on one device without torch.distributed: each sequence attends to itself."""

from __future__ import annotations

from collections.abc import Sequence

from knapformer.execution.local_attention import LocalAttention
from knapformer.models.layers import Attention


def local_attention(lengths: Sequence[int]) -> Attention:
    """Attention over whole sequences that lie one after another in packed order.

    Args:
        lengths: tokens of each sequence (text and visual together); zeros are allowed.

    Returns:
        The ``attention`` argument of a model. It raises ``LengthsError`` if its rows are not the lengths' sum.
    """
    return LocalAttention(lengths)
