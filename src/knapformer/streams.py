"""Text and visual tokens in one packed sequence: which packed rows belong to which stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.devices import to_device
from knapformer.execution.rows import MAX_RUNS, MIN_RUN_TOKENS, RowIndex, runs_of

TEXT, VISUAL = 0, 1
"""Stream ids, in the order in which the streams are stored inside a sequence."""


class StreamIndex(NamedTuple):
    """Where the tokens of each stream lie in packed order.

    A named tuple and not a dataclass, because FSDP2 walks a module's inputs and rebuilds them, and every torch version
    rebuilds tuples.

    Attributes:
        text: (T_text,) int64, packed rows of the text tokens, ascending.
        visual: (T_visual,) int64, packed rows of the visual tokens, ascending.
        packed: (T,) int64, the permutation with ``cat([text, visual]).index_select(0, packed)`` in packed order.
        runs: tokens of text, of visual, of text, of visual, … as they alternate in packed order, known to the host;
            the first of text may be 0.
    """

    text: Tensor
    visual: Tensor
    packed: Tensor
    runs: tuple[int, ...]

    @classmethod
    def from_stream_ids(cls, stream_ids: Any, *, device: torch.device | str | None = None) -> StreamIndex:
        """Index the streams of packed tokens.

        Args:
            stream_ids: (T,) host array, list or CPU tensor in packed order: 0 or False is text, 1 or True is visual.
            device: where the indices go; the CPU by default.

        Raises:
            ConfigurationError: ``stream_ids`` is not one-dimensional, or holds anything but 0 and 1.
        """
        ids = np.asarray(stream_ids)
        if ids.ndim != 1:
            raise ConfigurationError(f"stream_ids must have one dimension, got shape {ids.shape}")
        is_visual = ids.astype(bool)
        if not np.array_equal(is_visual, ids):
            other = ids[ids != is_visual.astype(ids.dtype)][0]
            raise ConfigurationError(f"stream_ids must be {TEXT} (text) or {VISUAL} (visual), got {other}")
        text, visual = np.flatnonzero(~is_visual), np.flatnonzero(is_visual)
        packed = np.empty(len(ids), np.int64)
        packed[np.concatenate([text, visual])] = np.arange(len(ids))
        on_device = [to_device(rows.astype(np.int64), device or "cpu") for rows in (text, visual, packed)]
        return cls(on_device[0], on_device[1], on_device[2], _alternating_runs(is_visual))

    @classmethod
    def from_lengths(
        cls, text: Sequence[int], visual: Sequence[int], *, device: torch.device | str | None = None
    ) -> StreamIndex:
        """Index whole sequences that are packed one after another, text first inside each.

        Args:
            text: text tokens of each sequence.
            visual: visual tokens of each sequence.
            device: where the indices go; the CPU by default.

        Raises:
            LengthsError: the two lists differ in length.
        """
        if len(text) != len(visual):
            raise LengthsError(f"text lists {len(text)} sequences, visual lists {len(visual)}")
        counts = np.asarray([text, visual], np.int64).T.ravel()
        return cls.from_stream_ids(np.repeat(np.tile([TEXT, VISUAL], len(text)), counts), device=device)

    def parts(self, counts: Sequence[int]) -> list[StreamIndex]:
        """Of the first ``counts[0]`` packed tokens, of the next ``counts[1]``, and so on."""
        if len(counts) == 1:
            return [self]
        is_visual = np.repeat(np.arange(len(self.runs)) % 2, self.runs).astype(bool)
        bounds = np.cumsum([0, *counts])
        num_visual = np.diff(np.cumsum([0, *is_visual])[bounds]).tolist()
        num_text = [count - visual for count, visual in zip(counts, num_visual, strict=True)]
        texts, visuals, packed = (
            x.split(list(n)) for x, n in ((self.text, num_text), (self.visual, num_visual), (self.packed, counts))
        )
        found = []
        for i, start in enumerate(bounds[:-1].tolist()):
            first_text, first_visual = sum(num_text[:i]), len(self.text) + sum(num_visual[:i])
            where = torch.where(
                packed[i] < len(self.text), packed[i] - first_text, packed[i] - first_visual + num_text[i]
            )
            runs = _alternating_runs(is_visual[start : start + counts[i]])
            found.append(StreamIndex(texts[i] - start, visuals[i] - start, where, runs))
        return found

    def merge(self, text: Tensor, visual: Tensor) -> Tensor:
        """(T_text, …) and (T_visual, …) to (T, …) in packed order."""
        if not self._is_by_runs:
            merged: Tensor = _Merge.apply(text, visual, self.text, self.visual, self.packed)
            return merged
        pairs = zip(_pieces(text, self.runs[0::2]), _pieces(visual, self.runs[1::2]), strict=True)
        return torch.cat([piece for pair in pairs for piece in pair])

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(T, …) in packed order to (T_text, …) and (T_visual, …); the inverse of ``merge``."""
        if not self._is_by_runs:
            text, visual = _Split.apply(packed, self.text, self.visual, self.packed)
            return text, visual
        pieces = packed.split(self.runs)
        return _joined(pieces[0::2]), _joined(pieces[1::2])

    def split_rows(self, index: RowIndex) -> tuple[RowIndex, RowIndex]:
        """Which row of a table each text token takes, and each visual token, from the same for packed tokens."""
        text, visual = (index.rows.index_select(0, tokens) for tokens in (self.text, self.visual))
        if torch.compiler.is_compiling() or index.runs is None:
            return RowIndex(text), RowIndex(visual)
        rows, counts = np.concatenate([run.table() for run in index.runs] or [np.zeros((2, 0), np.int64)], axis=1)
        edges = np.cumsum([0, *self.runs])
        visual_until = np.cumsum([0, *(n * (i % 2) for i, n in enumerate(self.runs))])
        num_visual = np.diff(np.interp(np.cumsum([0, *counts]), edges, visual_until)).round().astype(np.int64)
        return RowIndex(text, runs_of(counts - num_visual, rows)), RowIndex(visual, runs_of(num_visual, rows))

    @property
    def _is_by_runs(self) -> bool:
        """Whether runs are copied, and not tokens by their index. Backward of either copies, and adds nothing."""
        if torch.compiler.is_compiling() or not self.runs:
            return False
        if self.packed.device.type == "cpu":
            return len(self.runs) * MIN_RUN_TOKENS <= self.packed.shape[0]
        return len(self.runs) <= 2 * MAX_RUNS


class _Merge(Function):
    """By index. The index is a permutation, so that backward is a lookup by its inverse, and adds nothing."""

    @staticmethod
    def forward(
        ctx: Any, text: Tensor, visual: Tensor, text_rows: Tensor, visual_rows: Tensor, packed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(text_rows, visual_rows)
        ctx.dtypes = text.dtype, visual.dtype
        return torch.cat([text, visual]).index_select(0, packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (gradient.index_select(0, rows) for rows in ctx.saved_tensors)
        return *(part.to(dtype) for part, dtype in zip(found, ctx.dtypes, strict=True)), None, None, None


class _Split(Function):
    """The inverse of ``_Merge``, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, merged: Tensor, text_rows: Tensor, visual_rows: Tensor, packed: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(packed)
        return merged.index_select(0, text_rows), merged.index_select(0, visual_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, text: Tensor, visual: Tensor) -> tuple[Tensor | None, ...]:
        return torch.cat([text, visual]).index_select(0, *ctx.saved_tensors), None, None, None


def _alternating_runs(is_visual: np.ndarray[Any, Any]) -> tuple[int, ...]:
    """(T,) to the lengths of runs of False, True, False, True, …, an even number; the first may be 0."""
    starts = np.flatnonzero(np.diff(is_visual)) + 1
    edges = [0] * (len(is_visual) > 0 and bool(is_visual[0])) + [0, *starts.tolist(), len(is_visual)]
    runs = np.diff(edges).tolist()
    return tuple(runs + [0] * (len(runs) % 2))


def _pieces(x: Tensor, counts: Sequence[int]) -> Sequence[Tensor]:
    return x.split(list(counts)) if len(counts) > 1 else (x,)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
