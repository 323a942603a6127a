"""Random legal plans, query tiles and odd heads included, for tests of everything that reads plans."""

from __future__ import annotations

import itertools
import random

import numpy as np

from knapformer.plans.plan import Plan


def cuts(total: int, parts: int, rng: random.Random) -> list[int]:
    """``parts`` non-empty ranges of ``0:total``, as bounds; fewer where total is smaller."""
    inner = sorted(rng.sample(range(1, total), min(parts, total) - 1)) if total > 1 else []
    return [0, *inner, total]


def random_plan(
    ranks: list[list[int]],
    num_heads: int,
    rng: random.Random,
    *,
    num_kv_heads: int | None = None,
    split: float = 0.6,
    query_tiles: bool = True,
) -> Plan:
    """A plan that nobody would want: any rank may hold any tokens and compute any tiles.

    Args:
        split: the share of sequences that are split.
        query_tiles: tiles may have part of the queries.
    """
    world_size = len(ranks)
    lengths = [length for own in ranks for length in own]
    segments, tiles = [], []
    for length in lengths:
        own_segments, own_tiles = [], []
        if length and rng.random() >= split:
            rank = rng.randrange(world_size)
            own_segments, own_tiles = [(rank, 0, length)], [(rank, 0, num_heads, 0, length)]
        elif length:
            bounds = cuts(length, rng.randint(1, world_size + 1), rng)
            own_segments = [(rng.randrange(world_size), a, b) for a, b in itertools.pairwise(bounds)]
            head_bounds = cuts(num_heads, rng.randint(1, world_size), rng)
            for a, b in itertools.pairwise(head_bounds):
                rows = cuts(length, rng.choice([1, 1, 2, 3]) if query_tiles else 1, rng)
                own_tiles += [(rng.randrange(world_size), a, b, p, q) for p, q in itertools.pairwise(rows)]
        segments.append(own_segments)
        tiles.append(own_tiles)
    return Plan.from_placements(
        lengths=lengths,
        homes=np.repeat(np.arange(world_size), [len(own) for own in ranks]).tolist(),
        segments=segments,
        tiles=tiles,
        world_size=world_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        planner="random",
    )


def random_ranks(rng: random.Random, world_size: int, *, longest: int = 20) -> list[list[int]]:
    """Lengths per rank: ranks without sequences, and sequences of no or one token, among them."""
    return [
        [rng.choice([0, 1, rng.randint(2, longest), rng.randint(2, longest)]) for _ in range(rng.choice([0, 1, 2, 4]))]
        for _ in range(world_size)
    ]
