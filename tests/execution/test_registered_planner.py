"""A registered planner on several ranks: one plan for all of them, and one error where a rank lacks it (law 6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import run_ranks
from recipes import recipe

from knapformer import Balancer, CostModel, make_plan
from knapformer.errors import KnapFormerError
from knapformer.plans.registry import PLANNERS

COST = CostModel(hidden=32, num_heads=4)
LENGTHS = [[40, 3], [], [7, 0, 11]]


def plan_and_fail(rank: int, world_size: int) -> dict[str, Any]:
    """Digest of the plan, rows that come home, errors of a planner that the last rank lacks or that none has."""
    exec(recipe("Add a planner"), {})
    balancer = Balancer(COST, planner="evens")
    step = balancer.prepare(LENGTHS[rank])
    x = torch.arange(float(sum(LENGTHS[rank])))
    found = {"digest": step.plan.digest(), "num_split": int(step.plan.is_split.sum()), "plan": step.plan.planner}
    found["home"] = torch.equal(step.restore(step.route(x)), x)
    if rank == world_size - 1:
        del PLANNERS["evens"]
    for name, planner in (("lacking", "evens"), ("unknown", "nope")):
        try:
            Balancer(COST, planner=planner).prepare(LENGTHS[rank])
            found[name] = ""
        except KnapFormerError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(plan_and_fail, 3, timeout_s=60)


def test_all_ranks_have_its_plan(found):
    space: dict[str, Any] = {}
    exec(recipe("Add a planner"), space)
    try:
        expected = make_plan(LENGTHS, planner="evens", cost=COST)
    finally:
        del PLANNERS["evens"]
    assert [rank["digest"] for rank in found] == [expected.digest()] * 3
    assert all(rank["plan"] == "evens" and rank["num_split"] == 4 and rank["home"] for rank in found)


@pytest.mark.parametrize(
    ("case", "text"), [("lacking", "unknown planner 'evens'"), ("unknown", "unknown planner 'nope'")]
)
def test_a_planner_that_a_rank_lacks_is_one_error_on_all(found, case, text):
    errors = {rank[case] for rank in found}
    assert len(errors) == 1, errors
    assert text in errors.pop()
    if case == "lacking":
        assert "rank 2" in found[0][case]
