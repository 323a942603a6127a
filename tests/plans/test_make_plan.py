"""What every planner's plan keeps of what was asked for, and what is refused for all of them."""

from __future__ import annotations

import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.plans.planners import PLANNERS, evaluate, make_plan

ROWS = [[900, 30], [10], [5, 5], []]
NAMES = [name for name, planner in PLANNERS.items() if planner.package is None]


@pytest.mark.parametrize("planner", NAMES)
def test_a_plan_has_the_heads_offset_and_caps_that_were_asked_for(planner):
    cost = CostModel(hidden=96, num_heads=6)
    options = {"planner": planner, "cost": cost, "topology": "g1n4"}
    plan = make_plan(ROWS, **options, num_kv_heads=2, group_offset=8, max_tokens_per_rank=2000)
    assert (plan.num_heads, plan.num_kv_heads, plan.group_offset) == (6, 2, 8)
    assert plan.max_tokens_per_rank == (2000,) * 4
    plain = make_plan(ROWS, **options)
    assert (plain.num_heads, plain.num_kv_heads, plain.group_offset) == (6, 6, 0)


@pytest.mark.parametrize("planner", NAMES)
def test_bags_that_do_not_fit_the_ranks_are_refused(planner):
    with pytest.raises(ConfigurationError, match="3 ranks"):
        make_plan(ROWS, planner=planner, topology="g3n1")


@pytest.mark.parametrize("planner", NAMES)
@pytest.mark.parametrize("rows", [[[], []], [[0], [0, 0]]])
def test_a_step_without_tokens_costs_nothing(planner, rows):
    found = evaluate(make_plan(rows, planner=planner, topology="g1n2"))
    assert (found.makespan_s, found.lower_bound_s, found.discrepancy, found.over_lower_bound) == (0, 0, 0, 1)
    assert found.rank_busy_s.tolist() == [0, 0]
