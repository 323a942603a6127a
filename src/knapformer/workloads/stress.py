"""Lognormal lengths, for stress."""

from __future__ import annotations

import math

from knapformer.workloads.registry import Request, Rows, register_workload


@register_workload("lognormal:RANKS:PER_RANK", summary="median 1500, σ 1.2")
def draw_lognormal(request: Request) -> Rows:
    """Lognormal lengths of median 1500 and σ 1.2, between 16 and 131,072."""
    num_ranks, per_rank = request.count("RANKS"), request.count("PER_RANK")
    request.check_size(num_ranks, num_ranks * per_rank)

    def draw() -> int:
        return max(16, min(131_072, int(request.rng.lognormvariate(math.log(1500), 1.2))))

    return [[draw() for _ in range(per_rank)] for _ in range(num_ranks)]
