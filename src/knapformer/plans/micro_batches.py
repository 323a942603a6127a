"""Gradient accumulation: which sequences of an optimizer step run together in which of its micro-steps.

The gradients of a whole step are sums over its sequences, so it does not matter in which micro-step one of them runs.
Sequences stay at home on the rank that loaded them; only when they run changes. A pure function, like a planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import CapacityError, ConfigurationError, LengthsError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths
from knapformer.plans.problem import AUTO_CAP, Caps, rank_caps


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """What runs in one micro-step.

    Attributes:
        lengths: of all ranks; its sequence ids are its own.
        ids: (S,) ids of its sequences in the lengths that were split, ascending.
    """

    lengths: Lengths
    ids: IntArray

    def of_rank(self, rank: int, everything: Lengths) -> IntArray:
        """Positions, among all sequences of the optimizer step that ``rank`` loaded, of those that run here."""
        first, last = everything.offsets[rank : rank + 2]
        return np.asarray(self.ids[(self.ids >= first) & (self.ids < last)] - first)


def split_micro_batches(
    lengths: Lengths, num_micro_batches: int, cost: CostModel, max_tokens_per_rank: Caps = "auto"
) -> list[MicroBatch]:
    """Split an optimizer step into micro-steps of equal work.

    Args:
        lengths: of all sequences of the optimizer step.
        num_micro_batches: micro-steps; one may stay empty.
        cost: what lengths cost.
        max_tokens_per_rank: caps of each micro-step. ``"auto"`` lets none hold more than 1.5 × the mean of them, where
            sequences allow that.

    Returns:
        The micro-steps; every sequence is in one of them.

    Raises:
        ConfigurationError: not a positive number of micro-steps.
        CapacityError: the caps cannot hold the step, and by how much.
    """
    if isinstance(num_micro_batches, bool) or not isinstance(num_micro_batches, int) or num_micro_batches < 1:
        raise ConfigurationError(f"an optimizer step needs at least one micro-batch, got {num_micro_batches!r}")
    # 1. Room: tokens that a micro-step may hold.
    if isinstance(max_tokens_per_rank, str) or max_tokens_per_rank is None:
        rank_caps(max_tokens_per_rank, lengths)
        room, is_hard = AUTO_CAP * lengths.num_tokens / num_micro_batches, False
    else:
        empty = Lengths.from_ranks([[] for _ in range(lengths.num_ranks)])
        room, is_hard = float(sum(rank_caps(max_tokens_per_rank, empty))), True
    if is_hard and lengths.num_tokens > room * num_micro_batches:
        raise CapacityError(
            f"the optimizer step has {lengths.num_tokens} tokens, max_tokens_per_rank allows {int(room)} in each of "
            f"{num_micro_batches} micro-steps: {lengths.num_tokens - int(room) * num_micro_batches} too many"
        )
    # 2. Heaviest first, each to the micro-step with the least work that has room.
    work = cost.work_s(lengths.tokens)
    chosen = _least_loaded(work, lengths.tokens, num_micro_batches, room, is_hard=is_hard)
    # 3. Each micro-step's own lengths.
    return [_part(lengths, np.flatnonzero(chosen == index)) for index in range(num_micro_batches)]


def _least_loaded(
    work: npt.NDArray[np.float64], tokens: IntArray, num_micro_batches: int, room: float, *, is_hard: bool
) -> npt.NDArray[np.int64]:
    """(S,) the micro-step of each sequence. Ties go to the lower id and the earlier micro-step."""
    loads, held = np.zeros(num_micro_batches), np.zeros(num_micro_batches)
    chosen = np.zeros(len(work), np.int64)
    for sequence in np.argsort(-work, kind="stable"):
        fits = held + tokens[sequence] <= room
        if fits.any():
            index = int(np.argmin(np.where(fits, loads, np.inf)))
        elif is_hard:
            raise CapacityError(
                f"a sequence of {tokens[sequence]} tokens fits in no micro-step: {int(room - held.min())} of "
                f"{int(room)} tokens are free in the emptiest; raise max_tokens_per_rank or the number of micro-batches"
            )
        else:
            index = int(np.argmin(held))
        chosen[sequence] = index
        loads[index] += work[sequence]
        held[index] += tokens[sequence]
    return chosen


def _part(lengths: Lengths, ids: IntArray) -> MicroBatch:
    offsets = np.searchsorted(ids, lengths.offsets).astype(np.int64)
    streams = tuple((name, part[ids]) for name, part in lengths.streams)
    return MicroBatch(Lengths(lengths.tokens[ids], offsets, streams), ids)


def join_local(micro_batches: Sequence[dict[str, IntArray]]) -> dict[str, IntArray]:
    """One rank's micro-batches, one after another.

    Raises:
        ConfigurationError: there is none, or they name other streams.
    """
    if not micro_batches:
        raise ConfigurationError("an optimizer step needs at least one micro-batch, got none")
    names = list(micro_batches[0])
    for index, streams in enumerate(micro_batches):
        if list(streams) != names:
            raise ConfigurationError(f"micro-batch {index} names streams {list(streams)}, micro-batch 0 {names}")
    return {name: np.concatenate([streams[name] for streams in micro_batches]) for name in names}


def parse_micro_batches(micro_batches: Any) -> dict[str, IntArray]:
    """Check the lengths of one rank's micro-batches, and join them.

    Raises:
        LengthsError: no list of lengths.
        ConfigurationError: see ``join_local``.
    """
    if not isinstance(micro_batches, Sequence) or isinstance(micro_batches, str | bytes):
        raise LengthsError(f"micro-batches must be a list with the lengths of each, got {micro_batches!r}")
    return join_local([parse_local_lengths(lengths) for lengths in micro_batches])
