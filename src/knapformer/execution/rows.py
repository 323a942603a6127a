"""Rows of a table that many tokens share, as modulation does: lookups whose gradients are summed in float32.

PyTorch's own lookups add the gradients of a table's row in the table's dtype on the CPU, one token after another: in
bfloat16 a sum of ones stops at 256. Here every sum over tokens accumulates in float32 or better, on every device, and
in a fixed order.

Where the tokens of a row lie together, and few runs hold all of them, nothing is looked up at all: the row is broadcast
over a view of its tokens, and its gradient is one sum over that view. No row is then copied per token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.execution.devices import to_device

IntArray = np.ndarray[Any, np.dtype[np.int64]]

MAX_RUNS = 32
"""On an accelerator, more runs cost more launches than a lookup costs copies."""

MIN_RUN_TOKENS = 32
"""On the CPU, the same for runs of fewer tokens on average."""


class Run(NamedTuple):
    """Neighbouring rows of a table that equally many tokens share, row after row.

    Attributes:
        row: the first row.
        num_rows: how many.
        num_tokens: tokens of each of them, at least 1.
    """

    row: int
    num_rows: int
    num_tokens: int

    def table(self) -> IntArray:
        """(2, rows) each row, and its tokens."""
        return np.stack([np.arange(self.row, self.row + self.num_rows), np.full(self.num_rows, self.num_tokens)])


class RowIndex(NamedTuple):
    """Which row of a table each token takes.

    A named tuple and not a dataclass, because FSDP2 walks a module's inputs and rebuilds them.

    Attributes:
        rows: (T,) int64, in any order.
        runs: all tokens, in their order, where the host knows that those of each row lie together; else None.
    """

    rows: Tensor
    runs: tuple[Run, ...] | None = None

    @classmethod
    def from_counts(cls, counts: Sequence[int], *, device: torch.device | str | None = None) -> RowIndex:
        """Tokens in order of their rows: ``counts[0]`` of row 0, then ``counts[1]`` of row 1, and so on."""
        rows = np.repeat(np.arange(len(counts)), np.asarray(counts, np.int64))
        return cls(to_device(rows, device or "cpu"), runs_of(counts))

    def parts(self, counts: Sequence[int]) -> list[RowIndex]:
        """The first ``counts[0]`` tokens, the next ``counts[1]``, and so on; none ends inside a row's tokens."""
        if len(counts) == 1:
            return [self]
        parts = self.rows.split(list(counts))
        if self.runs is None:
            return [RowIndex(part) for part in parts]
        rows, tokens = np.concatenate([np.zeros((2, 0), np.int64), *(run.table() for run in self.runs)], axis=1)
        bounds = np.searchsorted(np.cumsum(tokens), np.cumsum(counts), side="right")
        pairs = pairwise([0, *bounds.tolist()])
        return [RowIndex(part, runs_of(tokens[a:b], rows[a:b])) for part, (a, b) in zip(parts, pairs, strict=True)]

    @property
    def counts(self) -> list[int]:
        """Tokens of each row that has some, in the order of the tokens; only with ``runs``."""
        assert self.runs is not None
        return [run.num_tokens for run in self.runs for _ in range(run.num_rows)]

    @property
    def is_by_runs(self) -> bool:
        """Whether rows are broadcast over their runs. A compiler fuses lookups, and would compile anew for each run."""
        if self.runs is None or torch.compiler.is_compiling():
            return False
        if self.rows.device.type == "cpu":
            return len(self.runs) * MIN_RUN_TOKENS <= self.rows.shape[0]
        return len(self.runs) <= MAX_RUNS


def runs_of(counts: Sequence[int] | IntArray, rows: Sequence[int] | IntArray | None = None) -> tuple[Run, ...]:
    """The runs of tokens that lie row after row.

    Args:
        counts: tokens of each row, in the order of the tokens.
        rows: which rows, each at most once; by default the first, the second, and so on.
    """
    counts = np.asarray(counts, np.int64)
    rows = np.arange(len(counts)) if rows is None else np.asarray(rows, np.int64)
    rows, counts = rows[counts > 0], counts[counts > 0]
    breaks = np.flatnonzero((np.diff(rows) != 1) | (np.diff(counts) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(rows)] if len(rows) else []
    return tuple(Run(int(rows[a]), b - a, int(counts[a])) for a, b in pairwise(bounds))


def rows(table: Tensor, index: Tensor | RowIndex) -> Tensor:
    """(S, …) and (T,) to (T, …): the row of each token. Gradients of a row are summed in float32 or better.

    Args:
        table: (S, …).
        index: (T,) int64 token to row, in any order, or the same as a ``RowIndex``.
    """
    found: Tensor = _Rows.apply(table, *_row_index(index))
    return found


def modulate(x: Tensor, shift: Tensor, scale: Tensor, index: Tensor | RowIndex) -> Tensor:
    """``x · (1 + scale) + shift`` with x (T, C), per-sequence shift and scale (S, C), index (T,) token to sequence."""
    modulated: Tensor = _Modulate.apply(x, shift, scale, *_row_index(index))
    return modulated


def add_gated(x: Tensor, update: Tensor, gate: Tensor, index: Tensor | RowIndex) -> Tensor:
    """``x + gate · update`` with x and update (T, C), per-sequence gate (S, C), index (T,) token to sequence."""
    gated: Tensor = _AddGated.apply(x, update, gate, *_row_index(index))
    return gated


def mean_by_row(x: Tensor, index: RowIndex, counts: Tensor) -> Tensor:
    """(T, C) to (S, C): the mean over the tokens of each row, of which there are ``counts`` (S,); 0 where none is.

    Returns:
        In float32 or better, as it was accumulated.
    """
    total: Tensor = _Sum.apply(x, counts.shape[0], *_row_index(index))
    return total / counts.clamp(min=1).to(total.dtype).unsqueeze(1)


def _sum_by_row(x: Tensor, index: RowIndex, num_rows: int) -> Tensor:
    """(T, C) to (num_rows, C): the sum over the tokens of each row, 0 where it has none.

    Accumulates in float32 or better, in a fixed order, without atomics.

    Returns:
        The dtype of ``x``, or float32.
    """
    if not index.is_by_runs:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # The backward pass of an embedding: sorted on CUDA, in order of the tokens on the CPU.
        total: Tensor = torch.ops.aten.embedding_dense_backward(wide, index.rows, num_rows, -1, False)
        return total
    total = x.new_zeros(num_rows, x.shape[1])
    for run, tokens in _runs(x, index):
        torch.sum(tokens, dim=1, out=total[run.row : run.row + run.num_rows])
    return total


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, token_rows: Tensor, runs: tuple[Run, ...] | None) -> Tensor:
        ctx.save_for_backward(token_rows)
        ctx.runs, ctx.shape, ctx.dtype = runs, table.shape, table.dtype
        return table.index_select(0, token_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        index = RowIndex(ctx.saved_tensors[0], ctx.runs)
        total = _sum_by_row(gradient.reshape(gradient.shape[0], -1), index, ctx.shape[0])
        return total.to(ctx.dtype).reshape(ctx.shape), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_rows: int, token_rows: Tensor, runs: tuple[Run, ...] | None) -> Tensor:
        ctx.save_for_backward(token_rows)
        ctx.dtype = x.dtype
        total = _sum_by_row(x, RowIndex(token_rows, runs), num_rows)
        return total.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]).to(ctx.dtype), None, None, None


class _Modulate(Function):
    """Keeps x and the table for backward, and no row per token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, token_rows: Tensor, runs: tuple[Run, ...] | None
    ) -> Tensor:
        ctx.save_for_backward(x, scale, token_rows)
        ctx.runs, ctx.shift_dtype = runs, shift.dtype
        return _combine(torch.addcmul, RowIndex(token_rows, runs), _Table(shift), x, _Table(1 + scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, token_rows = ctx.saved_tensors
        index = RowIndex(token_rows, ctx.runs)
        of_x = of_shift = of_scale = None
        if ctx.needs_input_grad[0]:
            of_x = _combine(torch.mul, index, gradient, _Table(1 + scale)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_shift = _sum_by_row(gradient, index, len(scale)).to(ctx.shift_dtype)
        if ctx.needs_input_grad[2]:
            of_scale = _sum_by_row(gradient * x, index, len(scale)).to(scale.dtype)
        return of_x, of_shift, of_scale, None, None


class _AddGated(Function):
    """Keeps the update and the table for backward, and no row per token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, gate: Tensor, token_rows: Tensor, runs: tuple[Run, ...] | None
    ) -> Tensor:
        ctx.save_for_backward(update, gate, token_rows)
        ctx.runs, ctx.x_dtype = runs, x.dtype
        return _combine(torch.addcmul, RowIndex(token_rows, runs), x, update, _Table(gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        update, gate, token_rows = ctx.saved_tensors
        index = RowIndex(token_rows, ctx.runs)
        of_update = of_gate = None
        if ctx.needs_input_grad[1]:
            of_update = _combine(torch.mul, index, gradient, _Table(gate)).to(update.dtype)
        if ctx.needs_input_grad[2]:
            of_gate = _sum_by_row(gradient * update, index, len(gate)).to(gate.dtype)
        return gradient.to(ctx.x_dtype), of_update, of_gate, None, None


class _Table(NamedTuple):
    """Marks an argument of ``_combine`` of which tokens share rows."""

    values: Tensor


def _combine(operator: Callable[..., Tensor], index: RowIndex, *arguments: Tensor | _Table) -> Tensor:
    """An elementwise operator on tokens (T, C) and on each token's row of tables (S, C), in their common dtype."""
    values = [a.values if isinstance(a, _Table) else a for a in arguments]
    shares = [isinstance(a, _Table) for a in arguments]
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in values))
    if not index.is_by_runs:
        looked_up = (v.index_select(0, index.rows) if shared else v for v, shared in zip(values, shares, strict=True))
        return operator(*looked_up)
    out = values[0].new_empty(index.rows.shape[0], values[0].shape[1], dtype=dtype)
    views = (_shared(v, index) if shared else _runs(v, index) for v, shared in zip(values, shares, strict=True))
    for (_, target), *found in zip(_runs(out, index), *views, strict=True):
        operator(*(view for _, view in found), out=target)
    return out


def _runs(x: Tensor, index: RowIndex) -> Iterator[tuple[Run, Tensor]]:
    """Each run, and its tokens (rows, tokens of each, C) as a view of x (T, C)."""
    assert index.runs is not None
    counts = [run.num_rows * run.num_tokens for run in index.runs]
    parts = x.split(counts) if len(counts) != 1 else (x,)
    for run, part in zip(index.runs, parts, strict=True):
        yield run, part.unflatten(0, (run.num_rows, run.num_tokens))


def _shared(table: Tensor, index: RowIndex) -> Iterator[tuple[Run, Tensor]]:
    """Each run, and its rows (rows, 1, C) as a view of the table (S, C)."""
    assert index.runs is not None
    for run in index.runs:
        yield run, table[run.row : run.row + run.num_rows].unsqueeze(1)


def _row_index(index: Tensor | RowIndex) -> RowIndex:
    """Without runs in compiled code, which has no use for them and would be compiled anew for other ones."""
    if isinstance(index, RowIndex):
        return RowIndex(index.rows) if torch.compiler.is_compiling() else index
    return RowIndex(index)
