"""The tight bound: no way to share a heavy sequence beats it, and it knows the links between nodes."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from planner_cases import random_case

from knapformer.given.cost import CostModel, Machine
from knapformer.plans.plan import Plan
from knapformer.plans.planners import Evaluation, evaluate, make_plan

HEADS = 24
LENGTH = 48_000


def shared(tokens: list[int], heads: list[int], length: int = LENGTH) -> Plan:
    """One sequence over as many ranks as there are numbers: so many tokens and so many heads on each."""
    cuts, head_cuts = np.cumsum([0, *tokens]).tolist(), np.cumsum([0, *heads]).tolist()
    return Plan.from_placements(
        lengths=[length],
        homes=[0],
        segments=[[(r, a, b) for r, (a, b) in enumerate(pairwise(cuts)) if a < b]],
        tiles=[[(r, a, b, 0, length) for r, (a, b) in enumerate(pairwise(head_cuts)) if a < b]],
        world_size=len(tokens),
        num_heads=head_cuts[-1],
        num_kv_heads=head_cuts[-1],
        planner="shares",
    )


def best_share(cost: CostModel, ranks: int = 2, step: int = 1) -> Evaluation:
    """The fastest of all shares, in multiples of ``step`` heads and as many tokens; the last rank has the rest."""
    shares = [
        [*first, HEADS - sum(first)]
        for first in product(range(0, HEADS + 1, step), repeat=ranks - 1)
        if sum(first) <= HEADS
    ]
    found = (evaluate(shared([LENGTH * x // HEADS for x in xs], ys), cost) for xs, ys in product(shares, repeat=2))
    return min(found, key=lambda evaluation: evaluation.makespan_s)


@pytest.mark.parametrize("inter_node_bytes_per_s", [5e9, 45e9, 300e9])
def test_no_share_of_two_nodes_beats_the_bound(inter_node_bytes_per_s: float) -> None:
    machine = Machine(ranks_per_node=1, inter_node_bytes_per_s=inter_node_bytes_per_s)
    best = best_share(CostModel(machine=machine))
    assert best.tight_bound_s <= best.makespan_s * (1 + 1e-12)
    gap = (best.makespan_s - best.tight_bound_s) / (best.makespan_s - best.lower_bound_s)
    assert gap < 0.5, "the bound explains less than half of what is beyond the work"


def test_the_bound_counts_slow_links_only_where_a_sequence_must_cross_them() -> None:
    slow, fast = (Machine(ranks_per_node=8, inter_node_bytes_per_s=rate) for rate in (5e9, 300e9))
    for lengths, crosses in (([[100_000], *[[]] * 15], True), ([[60_000], *[[20_000]] * 15], False)):
        plan = make_plan(lengths, max_tokens_per_rank=None)
        bounds = [evaluate(plan, CostModel(machine=machine)).tight_bound_s for machine in (slow, fast)]
        assert (bounds[0] > bounds[1] * 1.01) == crosses


@pytest.mark.parametrize(("length", "least"), [(100_147, 1.01), (131_072, 1.02)])
def test_one_sequence_of_more_than_a_node_forces_time_beyond_the_work(length: int, least: float) -> None:
    rest = [[2_500] * 9] * 31
    found = evaluate(make_plan([[length], *rest], max_tokens_per_rank=None))
    assert least < found.tight_bound_s / found.lower_bound_s <= found.over_lower_bound


@pytest.mark.parametrize("inter_node_bytes_per_s", [2e9, 5e9, 45e9])
def test_no_share_of_three_nodes_beats_the_bound(inter_node_bytes_per_s: float) -> None:
    machine = Machine(ranks_per_node=1, inter_node_bytes_per_s=inter_node_bytes_per_s)
    best = best_share(CostModel(machine=machine), ranks=3, step=6)
    assert best.lower_bound_s < best.tight_bound_s <= best.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize("gamma", [3.0, 10.0])
@pytest.mark.parametrize("rate", [1e9, 5e9, 45e9])
def test_an_attention_heavy_sequence_may_keep_most_tokens_on_one_rank(gamma: float, rate: float) -> None:
    machine = Machine(ranks_per_node=2, intra_node_bytes_per_s=rate)
    best = best_share(CostModel(gamma=gamma, machine=machine))
    assert best.lower_bound_s < best.tight_bound_s <= best.makespan_s * (1 + 1e-12)


@pytest.mark.parametrize(("ranks", "per_node"), [(8, 8), (24, 24), (4, 1), (24, 8), (12, 1)])
def test_even_shares_of_one_sequence_attain_the_bound(ranks: int, per_node: int) -> None:
    cost = CostModel(machine=Machine(ranks_per_node=per_node))
    found = evaluate(shared([LENGTH // ranks] * ranks, [HEADS // ranks] * ranks), cost)
    assert found.over_lower_bound > 1.02
    assert found.makespan_s == pytest.approx(found.tight_bound_s, rel=5e-3)


@pytest.mark.parametrize("ranks", [128, 256, 512])
def test_more_ranks_than_heads_need_the_keys_of_a_head_each(ranks: int) -> None:
    """A million tokens over many nodes: most of what lies beyond the work is communication that no plan avoids."""
    length, per_head = 1_000_000, ranks // 8
    lengths: list[list[int]] = [[length], *[[]] * (ranks - 1)]
    cost = CostModel(num_heads=8, hidden=3072)
    cuts = [length * k // per_head for k in range(per_head + 1)]
    plan = Plan.from_placements(
        lengths=[length],
        homes=[0],
        segments=[[(r, length * r // ranks, length * (r + 1) // ranks) for r in range(ranks)]],
        tiles=[[(h * per_head + k, h, h + 1, a, b) for h in range(8) for k, (a, b) in enumerate(pairwise(cuts))]],
        world_size=ranks,
        num_heads=8,
        num_kv_heads=8,
        planner="rows",
    )
    found = evaluate(plan, cost)
    assert plan.num_sequences == len([x for row in lengths for x in row])
    beyond = (found.tight_bound_s - found.lower_bound_s) / (found.makespan_s - found.lower_bound_s)
    assert 0.8 < beyond <= 1.0


def test_latency_is_part_of_the_bound() -> None:
    plan = shared([LENGTH // 8] * 8, [3] * 8)
    without, with_latency = (evaluate(plan, CostModel(machine=Machine(latency_s=s))) for s in (0.0, 1e-5))
    assert with_latency.makespan_s - without.makespan_s == pytest.approx(0.75 * 1e-5 * 7 * 2)
    assert with_latency.tight_bound_s - without.tight_bound_s > 0.75 * 1e-5 * 5.5
    assert with_latency.tight_bound_s <= with_latency.makespan_s


def climbed(seed: int, steps: int) -> float:
    """Least makespan over the tight bound on the way down from a random plan of one sequence."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 7))
    heads = int(rng.choice([2, 3, 12]))
    machine = Machine(
        ranks_per_node=int(rng.choice([1, 2, 3, 8])),
        inter_node_bytes_per_s=float(rng.choice([1e9, 1e10, 45e9])),
        speeds=tuple(rng.choice([0.5, 1.0, 1.3], ranks).tolist()) if rng.random() < 0.4 else (),
        nodes=tuple(sorted(rng.integers(0, 3, ranks).tolist())) if rng.random() < 0.4 else (),
        latency_s=float(rng.choice([0.0, 1e-6])),
    )
    cost = CostModel(128 * heads, heads, float(rng.choice([0.1, 0.6, 5.0])), machine=machine)
    length = int(rng.choice([3_000, 30_000, 300_000]))
    state = {name: rng.dirichlet(np.full(ranks, 10.0)) for name in ("tokens", "rows")}
    best: Any = None
    least = np.inf
    for _ in range(steps):
        trial = {k: np.maximum(v + rng.normal(0, 0.1, ranks) * (rng.random(ranks) < 0.5), 0) for k, v in state.items()}
        trial = {k: v / v.sum() if v.sum() else state[k] for k, v in trial.items()}
        found = evaluate(by_rows(trial["tokens"], trial["rows"], length, heads), cost)
        if best is None or found.makespan_s <= best:
            best, state = found.makespan_s, trial
        least = min(least, found.makespan_s / found.tight_bound_s)
    return float(least)


def by_rows(token_shares: Any, row_shares: Any, length: int, heads: int) -> Plan:
    """One sequence: tokens by their shares, and heads × query rows, laid end to end, by theirs."""
    cuts = np.rint(np.cumsum([0.0, *token_shares]) * length).astype(int).tolist()
    rows = np.rint(np.cumsum([0.0, *row_shares]) * length * heads).astype(int).tolist()
    cuts[-1], rows[-1] = length, length * heads
    tiles = [
        (r, h, h + 1, max(a - h * length, 0), min(b - h * length, length))
        for r, (a, b) in enumerate(pairwise(rows))
        for h in range(heads)
        if max(a, h * length) < min(b, (h + 1) * length)
    ]
    return Plan.from_placements(
        lengths=[length],
        homes=[0],
        segments=[[(r, a, b) for r, (a, b) in enumerate(pairwise(cuts)) if a < b]],
        tiles=[sorted(tiles, key=lambda x: (x[1], x[3]))],
        world_size=len(token_shares),
        num_heads=heads,
        num_kv_heads=heads,
        planner="rows",
    )


def test_no_local_search_gets_below_the_bound() -> None:
    found = [climbed(seed, 60) for seed in range(60)]
    assert min(found) >= 1 - 1e-12
    assert np.median(found) < 1.5, "the search finds nothing near the bound, so that it proves nothing"


@pytest.mark.parametrize("planner", ["moldable", "ulysses"])
def test_no_planner_beats_the_bound(planner: str) -> None:
    binding = 0
    for seed in range(250):
        case = random_case(seed, max_ranks=20)
        found = evaluate(make_plan(case.lengths, planner=planner, cost=case.cost, max_tokens_per_rank=None), case.cost)
        assert found.makespan_s >= found.tight_bound_s * (1 - 1e-12)
        binding += found.tight_bound_s > found.lower_bound_s * 1.001
    assert binding > 20
