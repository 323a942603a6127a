"""Attention among the rows of one rank: nothing is exchanged, and compiled code sees the same operator as elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from knapformer.errors import LengthsError
from knapformer.execution.attend import as_one_dtype
from knapformer.execution.kernels import Offsets, varlen_attention
from knapformer.execution.operator import attend, handle_of


class LocalAttention:
    """Entries that lie one after another: the queries of each see its keys.

    Args:
        queries: rows of each entry; zeros are allowed.
        keys: the same of keys and values, for cross-attention; by default the queries' own.

    Attributes:
        handle: for compiled code.
    """

    def __init__(self, queries: Sequence[int], keys: Sequence[int] | None = None) -> None:
        starts = _starts(queries)
        self._entries = _Entries(starts, starts if keys is None else _starts(keys))
        self.handle = handle_of(self._entries)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False) -> Tensor:
        """q (Tq, H, D), k and v (Tk, Hkv, D) to (Tq, H, D); see ``knapformer.execution.kernels.varlen_attention``.

        Raises:
            LengthsError: the rows are not the entries' sums.
            ConfigurationError: several dtypes.
        """
        if torch.compiler.is_compiling():
            return attend(q, k, v, self.handle, scale=scale, causal=causal)
        return self._entries(q, k, v, scale=scale, causal=causal)


class _Entries:
    """What ``LocalAttention`` does, without a handle. Each (E + 1,): where entries start, and the total."""

    def __init__(self, queries: list[int], keys: list[int]) -> None:
        self._queries, self._keys = queries, keys
        self._offsets: dict[torch.device, tuple[Offsets, Offsets]] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, causal: bool) -> Tensor:
        for name, x, starts in (("queries", q, self._queries), ("keys", k, self._keys), ("values", v, self._keys)):
            if x.shape[0] != starts[-1]:
                raise LengthsError(f"the lengths sum to {starts[-1]} tokens, got {x.shape[0]} rows of {name}")
        if q.device not in self._offsets:
            self._offsets[q.device] = (Offsets(self._queries, q.device), Offsets(self._keys, q.device))
        q, k, v = as_one_dtype(q, k, v)
        return varlen_attention(q, k, v, *self._offsets[q.device], scale=scale, causal=causal)


def _starts(lengths: Sequence[int]) -> list[int]:
    """(E,) rows of each entry to (E + 1,) where each starts, and their sum."""
    return [0, *accumulate(int(length) for length in lengths)]
