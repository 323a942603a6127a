"""Digests of many plans, for comparing runs: ``python plan_digests.py`` prints them as JSON. Needs NumPy only."""

from __future__ import annotations

import hashlib
import json
import platform

from planner_cases import random_case

from knapformer import CapacityError, CostModel, Lengths, make_plan
from knapformer.given.topology import Topology
from knapformer.plans.micro_batches import split_micro_batches
from knapformer.plans.planners import PLANNERS
from knapformer.workloads.workloads import workload

SEEDS = range(40)
WORKLOADS = ("joint", "lognormal:32:8")


def digests() -> dict[str, str]:
    """By planner, over random cases and two workloads on 32 ranks; and of micro-batches."""
    cases = [(c.lengths, c.cost, c.caps) for c in map(random_case, SEEDS)]
    cases += [(workload(name, seed=1, num_ranks=32), CostModel(), "auto") for name in WORKLOADS]
    planners = [planner for planner in PLANNERS.values() if planner.package is None]
    found = {name: hashlib.sha256() for name in (*(p.name for p in planners), "micro-batches")}
    for lengths, cost, caps in cases:
        for planner in planners:
            bags = Topology((1, len(lengths) - 1) if len(lengths) > 1 else (1,)) if planner.needs_bags else None
            try:
                plan = make_plan(lengths, planner=planner.name, topology=bags, cost=cost, max_tokens_per_rank=caps)
                found[planner.name].update(plan.digest())
            except CapacityError as error:
                found[planner.name].update(str(error).encode())
        parts = split_micro_batches(Lengths.from_ranks(lengths), 2, cost, None)
        found["micro-batches"].update(str([part.ids.tolist() for part in parts]).encode())
    return {name: digest.hexdigest() for name, digest in found.items()}


if __name__ == "__main__":
    print(json.dumps({"python": platform.python_version(), **digests()}))
