"""Samples cut into batches that keep the caps, and batches grouped into steps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from knapformer.errors import CapacityError
from knapformer.workloads.arrangement import Arrangement, Room

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """Samples in the order of their steps.

    Attributes:
        samples: (S,) positions in the data set.
        batch_offsets: (B + 1,) where batches begin in ``samples``.
        step_offsets: (steps + 1,) where steps begin among the batches.
    """

    samples: IntArray
    batch_offsets: IntArray
    step_offsets: IntArray

    def __len__(self) -> int:
        return len(self.step_offsets) - 1

    def batches(self, step: int) -> list[IntArray]:
        """The samples of each batch of a step."""
        first, last = self.step_offsets[step : step + 2]
        bounds = self.batch_offsets[first : last + 1]
        return [self.samples[start:end] for start, end in pairwise(bounds)]

    def samples_before(self, step: int) -> IntArray:
        """All samples of the steps before one."""
        return self.samples[: self.batch_offsets[self.step_offsets[step]]]


def arrange(
    tokens: IntArray, samples: IntArray, arrangement: Arrangement, rng: np.random.Generator | None = None
) -> Steps:
    """Cut samples into steps.

    Args:
        tokens: (S,) of all samples of the data set.
        samples: those that are left, in the order of the shuffle.
        arrangement: how.
        rng: shuffles the steps of whole samples; without it the heaviest come first. A step of fewer batches than ranks
            is the last one.

    Raises:
        CapacityError: a sample is longer than a rank (a whole step, with ``balance``) may hold.
    """
    share = arrangement.num_ranks if arrangement.balance else 1
    own_tokens, own_work = tokens[samples], arrangement.cost.work_s(tokens[samples])
    _check_cap(samples, own_tokens, arrangement.max_tokens_per_rank, share)
    room = Room(
        arrangement.num_ranks,
        (arrangement.samples_per_rank or len(samples)) * share,
        None if arrangement.most_tokens is None else arrangement.most_tokens * share,
        None if arrangement.max_work_per_rank_s is None else arrangement.max_work_per_rank_s * share,
    )
    bounds = _cut(own_tokens, own_work, room)
    if arrangement.balance:
        bounds = _fill_last(bounds, arrangement.num_ranks)
        return Steps(samples, bounds, np.arange(len(bounds), dtype=np.int64))
    return _group(samples, bounds, own_work, arrangement.num_ranks, rng)


def _cut(tokens: IntArray, work_s: FloatArray, room: Room) -> IntArray:
    """(B + 1,) bounds of batches along the samples, each as long as there is room."""
    sums = [
        (np.concatenate([[0], np.cumsum(values)]), limit)
        for values, limit in ((tokens, room.tokens), (work_s, room.work_s))
        if limit is not None
    ]
    bounds = [0]
    while bounds[-1] < len(tokens):
        start = bounds[-1]
        end = min(len(tokens), start + room.samples)
        for running, limit in sums:
            end = min(end, int(np.searchsorted(running, running[start] + limit, "right")) - 1)
        bounds.append(max(end, start + 1))
    return np.asarray(bounds, np.int64)


def _fill_last(bounds: IntArray, num_ranks: int) -> IntArray:
    """The last step gets a sample for every rank, where the step before it can spare them."""
    if len(bounds) < 3:
        return bounds
    missing = num_ranks - int(bounds[-1] - bounds[-2])
    if 0 < missing <= bounds[-2] - bounds[-3] - num_ranks:
        bounds = bounds.copy()
        bounds[-2] -= missing
    return bounds


def _group(
    samples: IntArray, bounds: IntArray, work_s: FloatArray, num_ranks: int, rng: np.random.Generator | None
) -> Steps:
    """Batches of like work become a step, the heaviest ones first; what is left over are the lightest."""
    if len(bounds) == 1:
        return Steps(samples, bounds, np.zeros(1, np.int64))
    heaviest_first = np.argsort(-np.add.reduceat(work_s, bounds[:-1]), kind="stable")
    batches = [samples[bounds[i] : bounds[i + 1]] for i in heaviest_first]
    num_full = len(batches) // num_ranks
    full, rest = batches[: num_full * num_ranks], batches[num_full * num_ranks :]
    if rest:
        full, rest = _spare(full, rest, num_ranks)
    order = np.arange(num_full) if rng is None else rng.permutation(num_full)
    batches = [full[step * num_ranks + i] for step in order for i in range(num_ranks)] + rest
    counts = np.asarray([num_ranks] * num_full + ([len(rest)] if rest else []), np.int64)
    sizes = np.asarray([len(batch) for batch in batches], np.int64)
    return Steps(np.concatenate(batches), _offsets(sizes), _offsets(counts))


def _spare(full: list[IntArray], rest: list[IntArray], num_ranks: int) -> tuple[list[IntArray], list[IntArray]]:
    """Single samples of the lightest full batches move to the left-over ones, until there is one for every rank.

    Where all full batches have one sample only, some ranks stay without.
    """
    missing, kept, taken = num_ranks - sum(map(len, rest)), list(full), list(rest)
    for index in range(len(full) - 1, -1, -1):
        count = min(missing, len(full[index]) - 1)
        if count > 0:
            kept[index], spared = np.split(full[index], [-count])
            taken += np.split(spared, count)
            missing -= count
    return kept, taken


def _check_cap(samples: IntArray, tokens: IntArray, cap: int | None, share: int) -> None:
    if cap is None or not len(tokens) or int(tokens.max()) <= cap * share:
        return
    longest = int(np.argmax(tokens))
    raise CapacityError(
        f"sample {samples[longest]} has {tokens[longest]} tokens, max_tokens_per_rank {cap} allows "
        + (f"{cap * share} over {share} ranks" if share > 1 else f"{cap} on a rank, and only balance=True splits it")
    )


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
