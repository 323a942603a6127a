"""Planners against the independent judge, the published planner's figures and the laws."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import judge_plan
import numpy as np
import pytest
from planner_cases import judge, random_case

from knapformer import _core
from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.cost import CostModel, Machine
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.plans.planners import PLANNERS, evaluate, make_plan
from knapformer.plans.problem import as_lengths, make_problem

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_bags.json").read_text())
SEEDS = range(40)


def assert_agrees(plan: Plan, lengths: list[list[int]], cost: CostModel) -> None:
    ours, theirs = evaluate(plan, cost), judge(plan, lengths, cost)
    assert ours.makespan_s == pytest.approx(theirs["makespan_s"], rel=1e-9)
    assert ours.bytes == pytest.approx(theirs["bytes"], rel=1e-9, abs=1)
    assert (ours.num_split, ours.num_meetings) == (theirs["split"], theirs["meetings"])
    if ours.lower_bound_s:
        assert ours.over_lower_bound == pytest.approx(theirs["T_over_LB"], rel=1e-9)
        assert ours.discrepancy == pytest.approx(theirs["max_over_mean"] - 1, abs=1e-9)


@pytest.mark.parametrize("planner", [name for name, p in PLANNERS.items() if p.package is None])
def test_predictions_agree_with_the_judge(planner: str) -> None:
    for seed in SEEDS:
        case = random_case(seed, max_ranks=20)
        topology = Topology.uniform(len(case.lengths), len(case.lengths)) if planner == "bags" else None
        plan = make_plan(case.lengths, planner=planner, topology=topology, cost=case.cost)
        assert_agrees(plan, case.lengths, case.cost)


def test_the_agreement_test_sees_a_wrong_link() -> None:
    lengths = [[9000], [100]]
    plan = make_plan(lengths, planner="bags", topology="g2n1")
    with pytest.raises(AssertionError):
        assert evaluate(plan).makespan_s == pytest.approx(
            judge(plan, lengths, CostModel(machine=Machine(ranks_per_node=1)))["makespan_s"], rel=1e-9
        )


def random_tiles(rng: np.random.Generator, length: int, heads: int, ranks: int) -> list[tuple[int, int, int, int, int]]:
    tiles, head = [], 0
    while head < heads:
        stop = int(rng.integers(head + 1, heads + 1))
        cuts = sorted({0, length, *rng.integers(0, length + 1, int(rng.integers(0, 3))).tolist()})
        tiles += [(int(rng.integers(ranks)), head, stop, a, b) for a, b in pairwise(cuts)]
        head = stop
    return tiles


def random_plan(seed: int) -> tuple[Plan, list[list[int]], CostModel]:
    """Arbitrary segments and query-row tiles, as no planner would place them."""
    rng = np.random.default_rng(seed)
    case = random_case(seed, max_ranks=12)
    ranks, heads = len(case.lengths), case.cost.num_heads
    lengths = as_lengths(case.lengths)
    segments, tiles = [], []
    for length in lengths.tokens.tolist():
        cuts = sorted({0, length, *rng.integers(0, length + 1, 3).tolist()})
        segments.append([(int(rng.integers(ranks)), a, b) for a, b in pairwise(cuts)])
        tiles.append(random_tiles(rng, length, heads, ranks) if length else [])
    plan = Plan.from_placements(
        lengths=lengths.tokens.tolist(),
        homes=lengths.homes.tolist(),
        segments=segments,
        tiles=tiles,
        world_size=ranks,
        num_heads=heads,
        num_kv_heads=heads,
        planner="random",
    )
    return plan, case.lengths, case.cost


def test_the_evaluator_agrees_with_the_judge_on_arbitrary_plans() -> None:
    for seed in range(200):
        assert_agrees(*random_plan(seed))


def test_no_plan_beats_the_bounds() -> None:
    for seed in range(200):
        plan, _, cost = random_plan(seed)
        found = evaluate(plan, cost)
        assert found.makespan_s >= found.tight_bound_s * (1 - 1e-12)
        assert found.tight_bound_s >= found.lower_bound_s * (1 - 1e-12)


def heaviest_rank(plan: Plan, topology: Topology) -> float:
    """The heaviest rank's Σ work / bag size in TFLOP, from where each sequence lies."""
    starts = [0, *accumulate(topology.bag_sizes)]
    load = [0.0] * len(topology.bag_sizes)
    for i, length in enumerate(plan.lengths.tolist()):
        bag = bisect_right(starts, plan.placement(i).ranks[0]) - 1
        load[bag] += (24 * length * 3072**2 + 0.6 * 4 * length**2 * 3072) / topology.bag_sizes[bag]
    return max(load) / 1e12


def excesses(planner_options: dict[str, Any]) -> list[float]:
    """Our heaviest rank over the published planner's, less 1, for every case and spec."""
    found = []
    for case in PUBLISHED["cases"]:
        for spec, published in case["max_workload"].items():
            plan = make_plan(case["lengths"], planner="bags", topology=spec, **planner_options)
            found.append(heaviest_rank(plan, Topology.parse(spec)) / published - 1)
    return found


def test_bags_equal_or_beat_the_published_planner() -> None:
    found = excesses({})
    assert len(found) == 300
    assert max(found) <= 1e-6


def test_the_published_comparison_sees_another_greedy() -> None:
    assert max(excesses({"cost": CostModel(gamma=0.0)})) > 1e-6


def test_bags_are_independent_in_repeated_groups() -> None:
    one = PUBLISHED["cases"][20]["lengths"]
    other = PUBLISHED["cases"][21]["lengths"]
    both = make_plan(one + other, planner="bags", topology="g4n8")
    single = make_plan(other, planner="bags", topology="g4n8")
    offset = sum(map(len, one))
    for i in range(single.num_sequences):
        assert [s.rank - 32 for s in both.placement(offset + i).segments] == [
            s.rank for s in single.placement(i).segments
        ]


def test_bags_split_evenly_where_heads_do_not_divide() -> None:
    place = make_plan([[10000], [], []], planner="bags", topology="g3n1", cost=CostModel(hidden=512, num_heads=8))
    tiles = place.placement(0).tiles
    assert [t.head_end - t.head_start for t in tiles] == [2, 3, 3]
    assert [s.end - s.start for s in place.placement(0).segments] == [3333, 3333, 3334]


@pytest.mark.parametrize("lengths", [[[]], [[0]], [[1], []], [[], [0, 1], [5]], [[1, 1, 1, 1]], [[3], [1], [], []]])
@pytest.mark.parametrize("planner", [name for name, p in PLANNERS.items() if p.package is None])
def test_small_steps_are_legal(lengths: list[list[int]], planner: str) -> None:
    topology = Topology.uniform(len(lengths), len(lengths))
    plan = make_plan(lengths, planner=planner, topology=topology)
    judge(plan, lengths, CostModel())
    assert plan.planner == planner


def test_whole_is_never_worse_than_home() -> None:
    for seed in range(300):
        case = random_case(seed)
        whole = make_plan(case.lengths, planner="whole", cost=case.cost)
        home = make_plan(case.lengths, planner="home", cost=case.cost)
        assert not whole.is_split.any()
        assert evaluate(whole, case.cost).makespan_s <= evaluate(home, case.cost).makespan_s * (1 + 1e-9)


def test_whole_finds_a_balance_that_greedy_misses() -> None:
    lengths = [[300, 300, 200, 200, 200], []]
    found = evaluate(make_plan(lengths, planner="whole", cost=CostModel(gamma=0.0)), CostModel(gamma=0.0))
    assert found.over_lower_bound == pytest.approx(1.0)


def test_caps_hold_or_fail() -> None:
    lengths = [[60, 60, 60], []]
    plan = make_plan(lengths, planner="whole", max_tokens_per_rank=120)
    assert plan.rank_tokens.max() <= 120
    with pytest.raises(CapacityError, match=r"180 tokens.*whole sequences of up to 60.*90"):
        make_plan(lengths, planner="whole", max_tokens_per_rank=90)
    with pytest.raises(CapacityError, match=r"180 tokens.*160 over 2 ranks: 20 too many"):
        make_plan(lengths, planner="whole", max_tokens_per_rank=80)
    with pytest.raises(CapacityError, match=r"rank 0 180 tokens, its cap is 100"):
        make_plan(lengths, planner="home", max_tokens_per_rank=100)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ConfigurationError, match=r"'best'.*home, whole"):
        make_plan([[1]], planner="best")
    with pytest.raises(ConfigurationError, match=r"3 ranks, the balancing group has 2"):
        make_plan([[1], [2]], planner="whole", max_tokens_per_rank=[1, 2, 3])
    with pytest.raises(ConfigurationError, match=r"'some'"):
        make_plan([[1], [2]], planner="whole", max_tokens_per_rank="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"not a multiple of the 2 ranks"):
        make_plan([[1]], planner="bags", topology="g2n1")
    with pytest.raises(ConfigurationError, match=r"machine.speeds lists 1 ranks"):
        make_plan([[1], [2]], planner="whole", cost=CostModel().with_machine(speeds=(1.0,)))
    with pytest.raises(ConfigurationError, match=r"plan has 24 heads, the cost model 12"):
        evaluate(make_plan([[1]], planner="home"), CostModel(num_heads=12))


def test_topology_names_the_ranks_per_node() -> None:
    lengths = [[4000], [4000], [4000], [4000]]
    by_topology = make_plan(lengths, planner="ulysses", topology=Topology(ranks_per_node=2))
    by_machine = make_plan(lengths, planner="ulysses", cost=CostModel().with_machine(ranks_per_node=2))
    assert by_topology == by_machine != make_plan(lengths, planner="ulysses")


def test_problem_arrays_come_back_typed() -> None:
    lengths = as_lengths([[5, 6], [7]])
    columns, _ = _core.home(make_problem(lengths.tokens, lengths.homes, 2, CostModel()))
    assert [c.dtype for c in columns] == [
        np.dtype(t) for t in ("i1", "i8", "i4", "i8", "i8", "i8", "i4", "i4", "i4", "i8", "i8")
    ]
    assert judge_plan.SCENARIOS.keys() == {"lowres", "mixres", "joint"}
