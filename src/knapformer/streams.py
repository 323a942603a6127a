"""Text and visual tokens in one packed sequence: which packed rows belong to which stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.devices import to_device

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
    """

    text: Tensor
    visual: Tensor
    packed: Tensor

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
        return cls(*(to_device(rows.astype(np.int64), device or "cpu") for rows in (text, visual, packed)))

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

    def merge(self, text: Tensor, visual: Tensor) -> Tensor:
        """(T_text, …) and (T_visual, …) to (T, …) in packed order."""
        return torch.cat([text, visual]).index_select(0, self.packed)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(T, …) in packed order to (T_text, …) and (T_visual, …); the inverse of ``merge``."""
        return packed.index_select(0, self.text), packed.index_select(0, self.visual)
