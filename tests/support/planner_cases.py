"""Random planning problems and the independent judge's view of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import judge_plan

from knapformer.given.cost import CostModel, Machine
from knapformer.plans.plan import Plan


@dataclass(frozen=True)
class Case:
    lengths: list[list[int]]
    cost: CostModel
    caps: Any


def random_case(seed: int, max_ranks: int | None = None) -> Case:
    """Any heads, lengths (0 and 1 among them), caps, speeds and nodes; 1 to 64 ranks, few of them as a rule."""
    rng = random.Random(seed)
    most = rng.choices([4, 8, 20, 64], [60, 30, 8, 2])[0]
    ranks = rng.randint(1, most if max_ranks is None else max_ranks)
    heads = rng.choice([1, 2, 3, 5, 12, 24, 38])
    scale = rng.choice([30, 3000, 30000, 200000])
    counts = rng.choice([[0, 1], [1, 2], [0, 1, 2, 5]])
    lengths = [[random_length(rng, scale) for _ in range(rng.choice(counts))] for _ in range(ranks)]
    machine = Machine(
        ranks_per_node=rng.choice([1, 2, 3, 8]),
        intra_node_bytes_per_s=rng.choice([300e9, 900e9]),
        inter_node_bytes_per_s=rng.choice([12e9, 45e9, 300e9]),
        communication_scale=rng.choice([0.0, 0.75, 1.0]),
        speeds=tuple(rng.choice([0.5, 1.0, 1.3]) for _ in range(ranks)) if rng.random() < 0.2 else (),
        nodes=tuple(sorted(rng.randrange(4) for _ in range(ranks))) if rng.random() < 0.2 else (),
        latency_s=rng.choice([0.0, 0.0, 5e-6, 1e-3]),
    )
    cost = CostModel(64 * heads, heads, rng.choice([0.0, 0.6, 1.3]), rng.choice([500e12, 1e12]), machine=machine)
    return Case(lengths, cost, random_caps(rng, lengths))


def random_length(rng: random.Random, scale: int) -> int:
    return rng.choice([0, 1, rng.randint(2, 40), rng.randint(1, scale), int(rng.lognormvariate(4, 1.5)), scale])


def random_caps(rng: random.Random, lengths: list[list[int]]) -> Any:
    total, ranks = sum(map(sum, lengths)), len(lengths)
    tight = -(-total // ranks)
    return rng.choice([None, "auto", tight, round(1.25 * tight) + 1, [tight + rng.randrange(5) for _ in range(ranks)]])


def judge(plan: Plan, lengths: list[list[int]], cost: CostModel) -> dict[str, Any]:
    """The judge's checks and figures for a plan."""
    content = plan.to_dict()
    judge_plan.check(content, lengths)
    machine, model = judge_plan.from_cost(cost.to_dict())
    return judge_plan.score(content, machine, model)
