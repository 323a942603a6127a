"""The layer-by-layer simulation against the evaluator's closed formula, and its traffic against the evaluator's."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.plans.plan import Plan
from knapformer.plans.planners import PLANNERS, evaluate, make_plan
from knapformer.predict.timeline import Sharding, rank_seconds, simulate_step
from knapformer.predict.traffic import traffic
from knapformer.workloads.workloads import workload

COST = CostModel(num_layers=40, pass_factor=4.0)
SPECS = [("home", None), ("whole", None), ("ulysses", None), ("bags", "g4n8"), ("bags", "g32n1"), ("moldable", None)]


def plan_of(name: str, planner: str, topology: str | None = None, cost: CostModel = COST) -> Plan:
    if planner not in PLANNERS:
        pytest.skip(planner)
    return make_plan(workload(name), planner=planner, topology=topology, cost=cost, max_tokens_per_rank=None)


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
@pytest.mark.parametrize("name", ["mixres", "joint", "wan:32:40000:0.5"])
@pytest.mark.parametrize(("planner", "topology"), SPECS)
def test_traffic_and_seconds_are_the_evaluators(
    name: str, planner: str, topology: str | None, latency_s: float
) -> None:
    cost = COST.with_machine(latency_s=latency_s)
    plan = plan_of(name, planner, topology)
    found, expected = traffic(plan, cost), evaluate(plan, cost)
    assert found.bytes == pytest.approx(expected.bytes, rel=1e-9)
    scale = COST.machine.communication_scale
    np.testing.assert_allclose(scale * (found.before_s + found.after_s), expected.rank_communication_s, rtol=1e-9)
    linear, whole, tiles = rank_seconds(plan, COST)
    np.testing.assert_allclose(linear, expected.rank_linear_s, rtol=1e-9)
    np.testing.assert_allclose(whole + tiles, expected.rank_attention_s, rtol=1e-9)


def test_keys_go_once_to_a_rank_with_two_query_tiles() -> None:
    plan = Plan.from_placements(
        lengths=[100],
        homes=[0],
        segments=[[(0, 0, 100)]],
        tiles=[[(1, 0, 24, 0, 50), (1, 0, 24, 50, 80), (0, 0, 24, 80, 100)]],
        world_size=2,
        num_heads=24,
        num_kv_heads=24,
        planner="by hand",
    )
    assert traffic(plan, COST).bytes == (2 * 100 + 2 * 80) * 3072 * 2 == evaluate(plan, COST).bytes


@pytest.mark.parametrize("name", ["mixres", "joint"])
@pytest.mark.parametrize(("planner", "topology"), SPECS)
def test_without_overlap_a_step_takes_the_closed_formulas_time(name: str, planner: str, topology: str | None) -> None:
    """The closed formula is the rate of ever more layers; a step's beginning and end may cost up to a layer more."""
    plan = plan_of(name, planner, topology)
    simulated = simulate_step(plan, COST, overlap=False).step_s
    formula = evaluate(plan, COST).step_time_s
    assert 0.93 * formula < simulated < formula * (1 + 1 / COST.num_layers)


def test_overlap_hides_exchange_time_and_never_adds_any() -> None:
    plan = plan_of("joint", "moldable")
    with_overlap, without = (simulate_step(plan, COST, overlap=o).step_s for o in (True, False))
    assert with_overlap < without
    assert with_overlap >= simulate_step(plan, COST).busy_s.max() * (1 - 1e-12)


def test_a_lone_rank_takes_its_work_and_nothing_else() -> None:
    lengths = [[3000, 500], [4000]]
    step = simulate_step(make_plan(lengths, planner="home", cost=COST), COST, exchange_latency_s=1.0)
    assert step.step_s == pytest.approx(160 * max(COST.work_s([3000, 500]).sum(), COST.work_s([4000]).sum()))


def test_latency_counts_per_exchange_and_pass() -> None:
    plan = make_plan([[5000], [0]], planner="ulysses", cost=COST)
    slow, fast = (simulate_step(plan, COST, exchange_latency_s=s).step_s for s in (1e-3, 0.0))
    assert slow - fast == pytest.approx((40 * 3 * 2 + 4) * 1e-3, rel=1e-6)


def test_tokens_travel_from_home_and_back_and_so_do_their_gradients() -> None:
    """Rank 1 takes half of 4000 tokens whole; each way it is one exchange before or behind all layers."""
    lengths = [[2000, 2000], []]
    plan = make_plan(lengths, planner="whole", cost=COST)
    away, there = (simulate_step(plan, COST, routed_channels=n).step_s for n in (64, 0))
    assert evaluate(plan, COST).moved_tokens == 2000
    one_way = 2000 * 64 * 2 / COST.machine.intra_node_bytes_per_s
    assert away - there == pytest.approx(4 * one_way, rel=1e-6)
    home = make_plan(lengths, planner="home", cost=COST)
    assert simulate_step(home, COST).step_s == simulate_step(home, COST, routed_channels=0).step_s


def test_routing_between_nodes_takes_the_slower_link() -> None:
    cost = COST.with_machine(ranks_per_node=1)
    plan = make_plan([[2000, 2000], []], planner="whole", cost=cost)
    away, there = (simulate_step(plan, cost, routed_channels=n).step_s for n in (64, 0))
    one_way = 2000 * 64 * 2 / COST.machine.inter_node_bytes_per_s
    assert away - there == pytest.approx(4 * one_way, rel=1e-6)


def test_gathers_hide_behind_layers_until_they_take_longer() -> None:
    plan = make_plan([[9000], [9000]], planner="home", cost=COST)
    plain = simulate_step(plan, COST).step_s
    layer = plain / (4 * COST.num_layers)
    quick, slow = (simulate_step(plan, COST, sharding=Sharding(2, f * layer, f * layer)).step_s for f in (0.5, 3.0))
    assert plain < quick < plain + 4 * layer
    assert slow > 2 * COST.num_layers * 3.0 * layer


def test_one_rank_slows_its_shard_group_but_no_other() -> None:
    """Within a step, ranks of another shard group run ahead; the step ends with the slowest."""
    plan = make_plan([[9000], [0], [10], [10]], planner="home", cost=COST)
    step = simulate_step(plan, COST, sharding=Sharding(2, 1e-9, 1e-9))
    assert step.step_s == pytest.approx(simulate_step(plan, COST).step_s, rel=1e-4)


def test_sharding_times_follow_links() -> None:
    inside = Sharding.of(COST, 16, shard_size=8, layer_parameters=1e8)
    across = Sharding.of(COST, 16, shard_size=16, layer_parameters=1e8)
    assert inside.gather_s == pytest.approx(2e8 * 7 / 8 / 300e9)
    assert across.gather_s == pytest.approx(2e8 * 15 / 16 / 45e9)
    assert inside.reduce_s == pytest.approx(inside.gather_s + 2 * 2e8 / 8 / 2 / 45e9)
    with pytest.raises(ConfigurationError, match="divide the 16 ranks, got 3"):
        Sharding.of(COST, 16, shard_size=3, layer_parameters=1e8)


def test_a_step_needs_a_backward_pass() -> None:
    with pytest.raises(ConfigurationError, match=r"at least three forward passes, got 1\.0"):
        simulate_step(plan_of("mixres", "home"), replace(COST, pass_factor=1.0))


def test_traffic_does_not_grow_with_the_square_of_the_ranks() -> None:
    """8192 ranks, of which a few exchange something; a matrix of all pairs would take half a gigabyte."""
    plan = Plan.from_placements(
        lengths=[40_000, *[2_000] * 8191],
        homes=list(range(8192)),
        segments=[[(0, 0, 30_000), (9, 30_000, 40_000)], *[[(r, 0, 2_000)] for r in range(1, 8192)]],
        tiles=[[(0, 0, 18, 0, 40_000), (9, 18, 24, 0, 40_000)], *[[(r, 0, 24, 0, 2_000)] for r in range(1, 8192)]],
        world_size=8192,
        num_heads=24,
        num_kv_heads=24,
        planner="by hand",
    )
    tracemalloc.start()
    found = traffic(plan, COST)
    step = simulate_step(plan, COST)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50e6
    assert list(zip(found.left.tolist(), found.right.tolist(), strict=True)) == [(0, 0), (0, 9), (9, 0), (9, 9)]
    assert found.bytes == evaluate(plan, COST).bytes
    assert step.busy_s.argmax() == 0
