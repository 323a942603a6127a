"""Two lanes: the formula beside the judge's, files, and what a plan for two lanes must reach."""

from __future__ import annotations

import json
import random
import statistics
from dataclasses import replace

import judge_plan
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import random_plan, random_ranks
from planner_cases import Case, judge, random_case

from knapformer.errors import ConfigurationError, PlanError
from knapformer.given.cost import CostModel
from knapformer.plans.plan import Plan
from knapformer.plans.planners import evaluate, make_plan
from knapformer.plans.text import format_plan, parse_plan


def with_random_lanes(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, lane=np.asarray([rng.randrange(2) for _ in range(plan.num_sequences)], np.int8))


def test_the_formula_is_the_judges():
    """On arbitrary plans, lanes, links, speeds and latencies; both parts of the formula decide in many of them."""
    by_rank = 0
    for seed in range(300):
        rng = random.Random(seed)
        case = random_case(seed, max_ranks=6)
        cost = case.cost.with_machine(interference=rng.choice([0.0, 0.1, 1.0]))
        plan = with_random_lanes(random_plan(case.lengths, cost.num_heads, rng), rng)
        ours, theirs = evaluate(plan, cost), judge(plan, case.lengths, cost)
        assert ours.makespan_s == pytest.approx(theirs["makespan_s"], rel=1e-9)
        assert (ours.bytes, ours.num_split, ours.num_meetings) == (theirs["bytes"], theirs["split"], theirs["meetings"])
        own = ours.rank_busy_s + cost.machine.interference * ours.rank_communication_s * (plan.num_lanes > 1)
        by_rank += ours.makespan_s == pytest.approx(own.max(), rel=1e-12)
    assert 50 < by_rank < 250


@pytest.mark.parametrize("seed", range(40))
def test_reads_back(seed):
    rng = random.Random(seed)
    plan = with_random_lanes(random_plan(random_ranks(rng, rng.randint(1, 5)), rng.randint(1, 4), rng), rng)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert parse_plan(format_plan(plan)) == plan
    if plan.num_sequences:
        assert plan != replace(plan, lane=np.asarray([])) and plan != replace(plan, lane=1 - plan.lane)


def test_refuses_what_is_no_lane():
    plan = make_plan([[40000], [3000]], lanes=2)
    content = plan.to_dict()
    assert content["lanes"] == 2 and {s.get("lane", 0) for s in content["sequences"]} == {0, 1}
    with pytest.raises(PlanError, match="1 or 2 lanes, got 3"):
        Plan.from_dict({**content, "lanes": 3})
    with pytest.raises(PlanError, match="no sequence in another"):
        Plan.from_dict({**content, "lanes": 1})
    with pytest.raises(PlanError, match="two lanes need 0 or 1"):
        replace(plan, lane=[0, 2])
    with pytest.raises(PlanError, match="two lanes need 0 or 1"):
        replace(plan, lane=[0])
    with pytest.raises(PlanError, match="needs lanes=2"):
        parse_plan(format_plan(plan).replace(" lanes=2", ""))
    for lanes in (0, 3, True, "both"):
        with pytest.raises(ConfigurationError, match="lanes must be 1, 2 or 'auto'"):
            make_plan([[4]], lanes=lanes)


@settings.get_profile("laws")
@given(st.integers(0, 2**32 - 1))
def test_the_laws_hold_on_random_steps(seed: int) -> None:
    """Each token and head once, caps, the judge's figure, the bound, and never worse than home."""
    case = random_case(seed)
    plan = plan_of(case)
    predicted, judged = evaluate(plan, case.cost), judge(plan, case.lengths, case.cost)
    assert predicted.makespan_s == pytest.approx(judged["makespan_s"], rel=1e-9)
    assert predicted.makespan_s >= predicted.lower_bound_s * (1 - 1e-9)
    caps = plan.max_tokens_per_rank
    assert not caps or (predicted.rank_tokens <= caps).all()
    home = make_plan(case.lengths, planner="home", cost=case.cost, max_tokens_per_rank=None)
    if not caps or (home.rank_tokens <= caps).all():
        assert predicted.makespan_s <= evaluate(home, case.cost).makespan_s * (1 + 1e-9)
    assert plan_of(case).digest() == plan.digest()


def plan_of(case: Case) -> Plan:
    return make_plan(case.lengths, cost=case.cost, max_tokens_per_rank=case.caps, lanes=2)


def joint(seed: int) -> list[list[int]]:
    return judge_plan.from_codes(judge_plan.SCENARIOS["joint"], random.Random(seed))


def mixres(seed: int) -> list[list[int]]:
    return judge_plan.from_codes(judge_plan.SCENARIOS["mixres"], random.Random(seed))


def lognormal(seed: int) -> list[list[int]]:
    return judge_plan.lognormal(64, 8, random.Random(seed))


def equal_on_64(seed: int) -> list[list[int]]:
    return [[4096] * (2 if rank < 36 else 1) for rank in range(64)]


@pytest.mark.parametrize("interference, most", [(0.0, 1.003), (0.1, 1.015)])
@pytest.mark.parametrize("workload", [joint, mixres, lognormal, equal_on_64])
def test_plans_near_the_lower_bound(workload, interference, most):
    """Medians of five seeds; one lane is at 1.01 to 1.07 of the bound."""
    cost = CostModel().with_machine(interference=interference)
    found = [
        evaluate(make_plan(workload(seed), cost=cost, lanes=2, max_tokens_per_rank="auto"), cost).over_lower_bound
        for seed in range(5)
    ]
    assert statistics.median(found) <= most


def test_auto_takes_the_faster():
    lengths = joint(0)
    slow_links = CostModel().with_machine(interference=1.0, intra_node_bytes_per_s=20e9, inter_node_bytes_per_s=1e9)
    for cost in (CostModel(), slow_links):
        one, two, auto = (make_plan(lengths, cost=cost, lanes=lanes) for lanes in (1, 2, "auto"))
        assert evaluate(auto, cost).makespan_s == min(evaluate(one, cost).makespan_s, evaluate(two, cost).makespan_s)


def test_one_lane_where_nothing_is_split():
    assert make_plan([[4096], [4096]], lanes=2).num_lanes == 1
    assert make_plan([[4096], [4096]], planner="home", lanes=2).num_lanes == 1


@pytest.mark.parametrize("planner", ["ulysses", "bags"])
def test_other_planners_plans_are_dealt(planner):
    """The same placement in two lanes, which hide its exchanges."""
    cost, lengths = CostModel(), joint(1)
    topology = "g4n8" if planner == "bags" else None
    one, two = (make_plan(lengths, planner=planner, topology=topology, cost=cost, lanes=lanes) for lanes in (1, 2))
    assert two.num_lanes == 2 and replace(two, lane=np.asarray([])) == one
    assert evaluate(two, cost).makespan_s < evaluate(one, cost).makespan_s
