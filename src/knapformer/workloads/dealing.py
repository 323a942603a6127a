"""A step's samples dealt to the ranks: the heaviest first, each to the rank with the least work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from knapformer.workloads.arrangement import Arrangement, Room

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


def deal(batches: Sequence[IntArray], tokens: IntArray, work_s: FloatArray, arrangement: Arrangement) -> list[IntArray]:
    """The samples of each rank, in one step.

    Heaviest first, each to the rank with the least work that has room; with ``balance``, where work is dealt out anew
    later, the longest first, each to the rank with the fewest tokens. Where that breaks a limit, or leaves the slowest
    rank slower than the step's own batches do, these are taken as they are. Each rank gets a sample where there are
    enough; ties go to the rank with fewer samples, then to the lower one.

    Args:
        batches: the samples of the step; at most one batch for each rank, or a single one with all of them.
        tokens, work_s: (S,) of all samples of the data set.
        arrangement: says how much a rank may take.
    """
    samples = np.concatenate(batches) if batches else np.zeros(0, np.int64)
    most_samples = arrangement.samples_per_rank or len(samples)
    room = Room(arrangement.num_ranks, most_samples, arrangement.most_tokens, arrangement.max_work_per_rank_s)
    if arrangement.balance:
        dealt = _least_loaded(samples, tokens.astype(np.float64), tokens, replace(room, tokens=None, work_s=None))
        assert dealt is not None
        return dealt
    dealt = _least_loaded(samples, work_s, tokens, room)
    own = _one_each([*batches, *[samples[:0]] * (arrangement.num_ranks - len(batches))])
    if dealt is None or _slowest(dealt, work_s) >= _slowest(own, work_s):
        return own
    return dealt


def _least_loaded(samples: IntArray, work_s: FloatArray, tokens: IntArray, room: Room) -> list[IntArray] | None:
    """None where a sample found no room."""
    ranks = [(0.0, 0, rank, 0) for rank in range(room.num_ranks)]
    dealt: list[list[int]] = [[] for _ in ranks]
    for sample in samples[np.argsort(-work_s[samples], kind="stable")].tolist():
        full = []
        while ranks:
            load, count, rank, held = heapq.heappop(ranks)
            load_after, held_after = load + float(work_s[sample]), held + int(tokens[sample])
            if room.holds(count + 1, held_after, load_after):
                dealt[rank].append(sample)
                heapq.heappush(ranks, (load_after, count + 1, rank, held_after))
                break
            if count < room.samples:
                full.append((load, count, rank, held))
        else:
            return None
        for entry in full:
            heapq.heappush(ranks, entry)
    return [np.asarray(own, np.int64) for own in dealt]


def _one_each(batches: list[IntArray]) -> list[IntArray]:
    """Ranks without a sample get one of those with the most, while any has two."""
    for rank, own in enumerate(batches):
        fullest = max(range(len(batches)), key=lambda r: (len(batches[r]), -r))
        if len(own) == 0 and len(batches[fullest]) > 1:
            batches[rank], batches[fullest] = batches[fullest][-1:], batches[fullest][:-1]
    return batches


def _slowest(batches: Sequence[IntArray], work_s: FloatArray) -> float:
    return max((float(work_s[own].sum()) for own in batches), default=0.0)
