"""Links slower than stated: what ``Machine.link_margin`` promises, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path

import judge_plan
import pytest
from planner_cases import judge, random_case

from knapformer.errors import ConfigurationError
from knapformer.given.cost import DEFAULT_LINK_MARGIN, CostModel, Machine
from knapformer.given.topology import uniform_topologies
from knapformer.plans.planners import evaluate, make_plan

STEPS = json.loads((Path(__file__).parents[2] / "benchmarks" / "steps" / "hard_steps.json").read_text())
ALLOWED, PRICE = 1.01, 1.03


def slower_links(cost: CostModel, near: float, far: float) -> CostModel:
    machine = cost.machine
    return cost.with_machine(
        intra_node_bytes_per_s=machine.intra_node_bytes_per_s / near,
        inter_node_bytes_per_s=machine.inter_node_bytes_per_s / far,
        latency_s=machine.latency_s * near,
    )


def best_bags_s(lengths: list[list[int]], cost: CostModel) -> float:
    bags = [
        make_plan(lengths, planner="bags", topology=t, cost=cost, max_tokens_per_rank=None)
        for t in uniform_topologies(len(lengths))
    ]
    return min(evaluate(plan, cost).makespan_s for plan in bags)


def hard_step(name: str, seed: int) -> tuple[list[list[int]], CostModel]:
    (step,) = (step for step in STEPS["steps"] if step["name"] == name and step["seed"] == seed)
    return STEPS["lengths"][step["lengths"]], CostModel.from_dict(step["cost"])


HUNYUAN, COST = hard_step("hunyuan1.5-64 (16h)", 30000)


def test_a_plan_for_slower_links_is_not_beaten_by_bags() -> None:
    trusting = make_plan(HUNYUAN, cost=COST.with_machine(link_margin=1.0), max_tokens_per_rank=None)
    careful = make_plan(HUNYUAN, cost=COST, max_tokens_per_rank=None)
    between, everywhere = (slower_links(COST, near, 3.0) for near in (1.0, 3.0))
    assert evaluate(trusting, between).makespan_s > ALLOWED * best_bags_s(HUNYUAN, between), "the case shows nothing"
    for world in (between, everywhere):
        assert evaluate(careful, world).makespan_s <= ALLOWED * best_bags_s(HUNYUAN, world)
    assert evaluate(careful, COST).makespan_s <= PRICE * evaluate(trusting, COST).makespan_s
    assert evaluate(careful, COST).makespan_s <= best_bags_s(HUNYUAN, COST)


def test_only_planners_read_the_margin() -> None:
    plan = make_plan(HUNYUAN, cost=COST, max_tokens_per_rank=None)
    makespans = {evaluate(plan, COST.with_machine(link_margin=margin)).makespan_s for margin in (1.0, 3.0, 30.0)}
    assert len(makespans) == 1
    assert judge(plan, HUNYUAN, COST)["makespan_s"] == pytest.approx(makespans.pop(), rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_the_price_is_bounded_by_what_it_saves(seed: int) -> None:
    """Over stated links a plan costs 3 % more than the trusting one, or as much as slower links would cost it."""
    case = random_case(seed)
    careful, trusting = (
        make_plan(case.lengths, cost=case.cost.with_machine(link_margin=m), max_tokens_per_rank=case.caps)
        for m in (DEFAULT_LINK_MARGIN, 1.0)
    )
    price = evaluate(careful, case.cost).makespan_s / max(evaluate(trusting, case.cost).makespan_s, 1e-300)
    worlds = [slower_links(case.cost, near, DEFAULT_LINK_MARGIN) for near in (1.0, DEFAULT_LINK_MARGIN)]
    worst = max(evaluate(trusting, w).makespan_s / max(evaluate(careful, w).makespan_s, 1e-300) for w in worlds)
    assert price <= max(PRICE, worst) * (1 + 1e-9)


def test_a_cost_file_keeps_the_margin() -> None:
    cost = COST.with_machine(link_margin=1.5)
    assert CostModel.from_dict(cost.to_dict()) == cost
    assert judge_plan.from_cost(cost.to_dict())[0].inter == COST.machine.inter_node_bytes_per_s


@pytest.mark.parametrize("margin", [0.5, 0, -1, True, "3", float("nan")])
def test_a_margin_is_a_number_of_at_least_one(margin: object) -> None:
    with pytest.raises(ConfigurationError, match="link_margin must be a number >= 1"):
        Machine(link_margin=margin)  # type: ignore[arg-type]
