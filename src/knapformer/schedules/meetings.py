"""Which ranks a step connects: those that exchange something, directly or through others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.schedules.tokens import IntArray

Links = tuple[IntArray, IntArray]
"""Pairs of ranks that exchange something: two columns."""


def links_of(plan: Plan, lengths: Lengths) -> Links:
    """Home and holder of each token segment, home and rank of each attention tile, where they are two ranks."""
    homes = lengths.homes.astype(np.int64)
    homes = homes[np.concatenate([plan.segment_sequence, plan.tile_sequence])]
    others = np.concatenate([plan.segment_rank, plan.tile_rank]).astype(np.int64)
    apart = homes != others
    return homes[apart], others[apart]


def connected(links: Sequence[Links], num_ranks: int) -> IntArray:
    """(N,) for each rank the lowest rank that the links connect it with, itself where there is none.

    Args:
        links: of one step, or of several.
    """
    label = np.arange(num_ranks)
    if not links:
        return label
    a, b = (np.concatenate(columns) for columns in zip(*links, strict=True))
    if num_ranks == 2 and len(a):
        return np.zeros_like(label)
    while True:
        lower = np.minimum(label[a], label[b])
        found = label.copy()
        np.minimum.at(found, a, lower)
        np.minimum.at(found, b, lower)
        found = found[found]
        if np.array_equal(found, label):
            return label
        label = found
