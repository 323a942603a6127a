"""A plan says what won."""

from dataclasses import replace

import pytest

from knapformer import CostModel, Plan, PlanError, make_plan
from knapformer.plans.text import format_plan, parse_plan

WAN = CostModel(hidden=1536, num_heads=12)


@pytest.mark.parametrize(
    ("lengths", "planner", "topology"),
    [
        ([[], [4000, 20000], [], [500]], "ulysses", None),
        ([[500], [100, 20000], [100, 20000, 20000], [20000], [], [1000] * 2, [], [1000, 100, 100]], "bags", "g2n4"),
        ([[4000, 1000], [4000, 100, 100], [4000, 1000], [500, 1000, 100]], "bags", "g1n4"),
    ],
)
def test_another_planners_plan_that_wins_is_named(lengths, planner, topology):
    plan = make_plan(lengths, max_tokens_per_rank=None)
    other = make_plan(lengths, planner=planner, topology=topology, max_tokens_per_rank=None)
    assert plan.reason == (planner if topology is None else f"{planner}:{topology}")
    assert replace(other, planner=plan.planner) == plan != other


def test_own_plans_say_so():
    assert make_plan([[256, 256], [256, 256]]).reason == "whole sequences"
    plan = make_plan([[], [100, 4000], [4000, 4000, 500]])
    assert plan.reason == "own layout" and plan.is_split.any()
    assert make_plan([[20000], [500]], planner="home").reason == ""


def test_fewer_ranks_are_counted():
    plan = make_plan([[147_600]] + [[]] * 511, cost=WAN)
    assert plan.reason == f"own layout on {len(set(plan.tile_rank.tolist()))} of 512 ranks"


def test_a_plan_for_slower_links_says_so():
    lengths = [[500, 100, 4000], [100, 1000, 1000], [4000]]
    plan = make_plan(lengths, max_tokens_per_rank=None)
    hopeful = make_plan(lengths, max_tokens_per_rank=None, cost=CostModel().with_machine(link_margin=1.0))
    assert plan.reason == hopeful.reason + ", safer where links are slower than stated"
    assert plan != hopeful


def test_two_lanes_say_so():
    assert make_plan([[20000], [500], [500], [500]], lanes=2).reason


def test_a_file_keeps_it_and_equal_plans_may_differ_in_it(tmp_path):
    plan = make_plan([[], [4000, 20000], [], [500]], max_tokens_per_rank=None)
    again = Plan.from_dict(plan.to_dict())
    assert again == plan and again.reason == plan.reason == "ulysses"
    grid = parse_plan(format_plan(plan))
    assert grid == plan and grid.reason == ""
    with pytest.raises(PlanError, match="a plan's reason is a line of text"):
        replace(plan, reason="two\nlines")
