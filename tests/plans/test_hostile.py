"""What no careful caller gives: each is one of our errors, at once, and never a crash, a hang or another plan."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from knapformer import CostModel, Lengths, Machine, Plan, Topology, evaluate, make_plan
from knapformer.errors import ConfigurationError, KnapFormerError, LengthsError, PlanError
from knapformer.plans.text import format_plan, parse_plan

ROWS = [[1000, 50_000, 30_000], [7], [7], [3]]
FILE = make_plan([[10], []], cost=CostModel(num_heads=4, hidden=64)).to_dict()
GRID = "plan x world=2 heads=4 kv=4"
HUGE = 10**400


def changed(path: list[Any], value: Any) -> Callable[[], Any]:
    """Reads ``FILE`` with another value at ``path``."""
    content = json.loads(json.dumps(FILE))
    at = content
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return lambda: Plan.from_dict(content)


def planned(cost: CostModel) -> Any:
    return make_plan(ROWS, cost=cost)


SEQUENCE, SEGMENT, TILE = ["sequences", 0], ["sequences", 0, "tokens", 0], ["sequences", 0, "heads", 0]
CASES: dict[str, tuple[type[KnapFormerError], Callable[[], Any]]] = {
    "gamma beyond numbers": (ConfigurationError, lambda: planned(CostModel(gamma=1e308))),
    "gamma": (ConfigurationError, lambda: planned(CostModel(gamma=1e90))),
    "slow device": (ConfigurationError, lambda: planned(CostModel(flops_per_s=1e-99))),
    "communication": (ConfigurationError, lambda: planned(CostModel(machine=Machine(communication_scale=1e90)))),
    "links": (ConfigurationError, lambda: planned(CostModel(machine=Machine(inter_node_bytes_per_s=1e-90)))),
    "latency": (ConfigurationError, lambda: planned(CostModel(machine=Machine(latency_s=1e99)))),
    "negative latency": (ConfigurationError, lambda: Machine(latency_s=-1e-6)),
    "speeds": (ConfigurationError, lambda: planned(CostModel(machine=Machine(speeds=(1e-90, 1e90, 1, 1))))),
    "pairs": (ConfigurationError, lambda: planned(CostModel(attention_flops_per_pair=1e99))),
    "hidden": (ConfigurationError, lambda: CostModel(hidden=1e200)),  # type: ignore[arg-type]
    "hidden of 400 digits": (ConfigurationError, lambda: CostModel(hidden=HUGE)),
    "heads": (ConfigurationError, lambda: CostModel(num_heads=2**31)),
    "no machine": (ConfigurationError, lambda: CostModel(machine=None)),  # type: ignore[arg-type]
    "a far node": (ConfigurationError, lambda: Machine(nodes=(2**31, 0))),
    "half a node": (ConfigurationError, lambda: Machine(nodes=(1.9, 0))),  # type: ignore[arg-type]
    "one node": (ConfigurationError, lambda: Machine(nodes=5)),  # type: ignore[arg-type]
    "one speed": (ConfigurationError, lambda: Machine(speeds=5.0)),  # type: ignore[arg-type]
    "a speed of 400 digits": (ConfigurationError, lambda: Machine(speeds=(HUGE, 1))),
    "cost file of a list": (ConfigurationError, lambda: CostModel.from_dict(None)),  # type: ignore[arg-type]
    "cost file of odd keys": (ConfigurationError, lambda: CostModel.from_dict({"hidden": 4, "num_heads": 4, 3: 1})),  # type: ignore[dict-item]
    "negative lengths": (LengthsError, lambda: Lengths(np.array([-5, 10]), np.array([0, 2]))),
    "long lengths": (LengthsError, lambda: Lengths(np.array([2**62, 2**62]), np.array([0, 2]))),
    "half tokens": (LengthsError, lambda: Lengths(np.array([5.5, 10.0]), np.array([0, 2]))),  # type: ignore[arg-type]
    "no offsets": (LengthsError, lambda: Lengths(np.array([5]), np.array([], int))),
    "long streams": (LengthsError, lambda: Lengths.from_ranks([{"a": [2**31 - 1], "b": [2**31 - 1]}])),
    "streams of one name": (LengthsError, lambda: Lengths.from_ranks([{1: [1], "1": [2]}])),
    "no rank": (LengthsError, lambda: make_plan([])),
    "no lengths": (LengthsError, lambda: make_plan(None)),  # type: ignore[arg-type]
    "a number": (LengthsError, lambda: make_plan(5)),  # type: ignore[arg-type]
    "another cost": (ConfigurationError, lambda: make_plan([[1]], cost=5)),  # type: ignore[arg-type]
    "half a cap": (ConfigurationError, lambda: make_plan([[1]], max_tokens_per_rank=1.5)),  # type: ignore[arg-type]
    "a cap that is true": (ConfigurationError, lambda: make_plan([[1], [2]], max_tokens_per_rank=[True, 5])),
    "a cap without a dimension": (ConfigurationError, lambda: make_plan([[1], [2]], max_tokens_per_rank=np.array(50))),  # type: ignore[arg-type]
    "no offset": (PlanError, lambda: make_plan([[1]], group_offset=None)),  # type: ignore[arg-type]
    "many bags": (ConfigurationError, lambda: Topology.parse("g1n99999999999")),
    "bags of 5000 digits": (ConfigurationError, lambda: Topology.parse("g1n" + "9" * 5000)),
    "rank 2**32": (PlanError, changed([*SEGMENT, "rank"], 2**32)),
    "head 2**32": (PlanError, changed([*TILE, "end"], 2**32 + 4)),
    "half a token": (ConfigurationError, changed([*SEQUENCE, "length"], 10.7)),
    "a length as text": (ConfigurationError, changed([*SEQUENCE, "length"], "10")),
    "half a rank": (ConfigurationError, changed([*SEGMENT, "rank"], 0.7)),
    "half a row": (ConfigurationError, changed([*TILE, "queries"], [0.0, 10.5])),
    "no rows": (ConfigurationError, changed([*TILE, "queries"], [])),
    "a long sequence": (PlanError, changed([*SEQUENCE, "length"], 2**62)),
    "many ranks": (PlanError, changed(["world_size"], 10**12)),
    "a planner's number": (ConfigurationError, changed(["planner"], 5)),
    "a planner of two lines": (PlanError, changed(["planner"], "a\nb")),
    "half key heads": (ConfigurationError, changed(["num_kv_heads"], 2.0)),
    "a rank before 0": (PlanError, changed(["group_offset"], -1)),
    "plan file of a list": (ConfigurationError, lambda: Plan.from_dict([1])),  # type: ignore[arg-type]
    "grid of many ranks": (PlanError, lambda: parse_plan("plan x world=999999999999 heads=4 kv=4")),
    "empty grid": (PlanError, lambda: parse_plan("")),
    "grid of a letter": (PlanError, lambda: parse_plan(f"{GRID}\nhome 0 | a")),
    "grid of a far home": (PlanError, lambda: parse_plan(f"{GRID}\nhome 5 | 10")),
    "grid of two homes": (PlanError, lambda: parse_plan(f"{GRID}\nhome 0 | 1\nhome 0 | 2")),
    "grid of no caps": (PlanError, lambda: parse_plan(f"{GRID} cap=,")),
    "grid of head 2**32": (PlanError, lambda: parse_plan(f"{GRID}\nhome 0 | 10\nrank 0 | 0[0:10]{{0:4294967300}}")),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", CASES)
def test_is_one_of_our_errors(name):
    kind, call = CASES[name]
    with pytest.raises(kind):
        call()


@pytest.mark.parametrize(
    "caps",
    [sys.maxsize, 2**61, 2**63, [0, 2**63, 0, 2**63], np.array([0, 2**40, 0, 2**40]), [0, 2**63 - 1, 0, 2**63 - 1]],
)
def test_wide_caps_are_no_caps(caps):
    free, capped = (make_plan(ROWS, max_tokens_per_rank=c) for c in (None, caps))
    assert evaluate(capped).makespan_s >= evaluate(free).makespan_s
    if isinstance(caps, int):
        assert np.array_equal(capped.segment_rank, free.segment_rank)
    else:
        assert not capped.rank_tokens[[0, 2]].any()


def test_a_planner_may_have_two_words():
    plan = replace(make_plan(ROWS), planner="by heads")
    assert parse_plan(format_plan(plan)) == plan == Plan.from_dict(plan.to_dict())


@pytest.mark.parametrize("read", [Plan.read, CostModel.read])
def test_deep_json_is_no_file_of_ours(tmp_path, read):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ConfigurationError, match="is not JSON"):
        read(tmp_path / "deep.json")


def test_a_plan_shares_no_memory_with_its_maker():
    plan = make_plan(ROWS)
    fields = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    ranks = plan.segment_rank.copy()
    other = Plan(**{**fields, "segment_rank": ranks[:]})
    ranks[:] = 10**6
    assert other == plan
    tokens = np.array([3, 4])
    offsets = np.array([0, 2])
    lengths = Lengths(tokens, offsets, (("text", tokens),))
    tokens[0], offsets[1] = 5, 1
    assert lengths.to_lists() == [[3, 4]] and lengths.streams[0][1].tolist() == [3, 4]


def lognormal(num_ranks: int, per_rank: int) -> list[list[int]]:
    rng = random.Random(0)

    def draw() -> int:
        return max(16, min(131_072, int(rng.lognormvariate(7.3, 1.2))))

    return [[draw() for _ in range(per_rank)] for _ in range(num_ranks)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("share", [1, 2])
def test_caps_that_just_fit_are_planned_soon(share):
    """Groups of hundreds of ranks once took half a minute; ``share``: every rank or every other one holds tokens."""
    rows = lognormal(300, 8)
    num_tokens, holders = sum(map(sum, rows)), 300 // share
    caps = [0 if rank % share else -(-num_tokens // holders) for rank in range(300)]
    plan = make_plan(rows, max_tokens_per_rank=caps)
    assert (plan.rank_tokens <= caps).all()


@pytest.mark.timeout(10)
def test_free_exchanges_are_planned_soon():
    rng = random.Random(0)
    cost = CostModel(machine=Machine(communication_scale=0))
    plan = make_plan([[rng.randint(1, 30_000)] for _ in range(300)], cost=cost)
    found = evaluate(plan, cost)
    assert found.makespan_s < 1.05 * found.lower_bound_s
