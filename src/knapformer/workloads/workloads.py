"""Sequence lengths of published training workloads. A name and a seed give the same lengths everywhere.

Three families: KnapFormer's scenarios in its data codes (``codes``), Zellige's Wan 2.1 mixes (``wan``) and the bucket
tables of Open-Sora 1.2 and 2.0 (``opensora``); and lognormal lengths for stress.
"""

from __future__ import annotations

import random

from knapformer.errors import ConfigurationError
from knapformer.given.lengths import MAX_LENGTH_TOKENS
from knapformer.workloads import codes, opensora, stress, wan  # noqa: F401  (they register workloads)
from knapformer.workloads.registry import WORKLOADS, Request, Rows, Workload, workload_names

__all__ = ["all_workloads", "draw", "find_workload", "workload", "workload_names"]


def all_workloads() -> list[Workload]:
    """Every one that has a name, and data codes."""
    return [*WORKLOADS.values(), codes.CODES]


def find_workload(name: str) -> Workload:
    """The workload of a name; data codes where it is no other's."""
    return WORKLOADS.get(name.partition(":")[0], codes.CODES)


def draw(name: str, rng: random.Random, num_ranks: int | None = None) -> Rows:
    """The lengths of one step of a workload.

    Args:
        name: of the form of one of ``workload_names()``, or data codes.
        rng: advanced; draws follow one another as a training run's steps do.
        num_ranks: for data codes, a multiple of their ranks; for Open-Sora any number, 32 by default. The other names
            fix it.

    Raises:
        ConfigurationError: an unknown name, ranks that do not fit it, or more of them, or longer sequences, than are
            drawn.
    """
    found = find_workload(name)
    values = {} if found is codes.CODES else found.read(name)
    rows = found.draw(Request(name, found.pattern, values, rng, num_ranks))
    if num_ranks not in (None, len(rows)):
        raise ConfigurationError(f"workload {name!r} is for {len(rows)} ranks, got {num_ranks}")
    longest = max((length for row in rows for length in row), default=0)
    if longest > MAX_LENGTH_TOKENS:
        raise ConfigurationError(
            f"workload {name!r} has a sequence of {longest:,} tokens, at most {MAX_LENGTH_TOKENS:,}"
        )
    return rows


def workload(name: str, *, seed: int = 0, num_ranks: int | None = None) -> Rows:
    """``draw`` with a generator of its own."""
    return draw(name, random.Random(seed), num_ranks)
