"""Law 1: a plan places every token and every head once, and reads back as it was written."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import fields, replace

import numpy as np
import pytest
from plan_cases import random_plan, random_ranks

from knapformer.errors import ConfigurationError, PlanError
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.plans.planners import make_plan
from knapformer.plans.text import format_plan, parse_plan


def example(seed: int = 0) -> Plan:
    rng = random.Random(seed)
    return random_plan([[7, 0, 12], [], [1, 30]], 5, rng, split=1.0)


@pytest.mark.parametrize("seed", range(60))
def test_reads_back(seed):
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    plan = random_plan(random_ranks(rng, rng.randint(1, 5)), kv_heads * rng.randint(1, 4), rng, num_kv_heads=kv_heads)
    plan = replace(plan, group_offset=rng.choice([0, 4]))
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert parse_plan(format_plan(plan)) == plan


def test_digest_tells_plans_apart():
    plan = example()
    moved = plan.segment_rank.copy()
    moved[0] = (moved[0] + 1) % plan.world_size
    assert replace(plan, segment_rank=moved) != plan
    assert replace(plan, planner="other") != plan
    assert len({plan, example()}) == 1


@pytest.mark.parametrize("name", [f.name for f in fields(Plan) if f.name != "reason"])
def test_digest_has_every_part_of_a_plan(name):
    """Also what no legal plan could have: ranks compare digests before anything else."""
    plan = replace(example(), max_tokens_per_rank=(50, 50, 50), lane=[0, 1, 0, 1, 0])
    value = getattr(plan, name)
    if isinstance(value, np.ndarray):
        changed = value.copy()
        changed[-1] += 1
    else:
        changed = {int: lambda: value + 1, str: lambda: value + "!", tuple: lambda: (50, 50, 51)}[type(value)]()
    other = copy.copy(plan)
    object.__setattr__(other, name, changed)
    assert copy.copy(plan) == plan
    assert other != plan and hash(other) != hash(plan)


def test_is_frozen():
    with pytest.raises(ValueError, match="read-only"):
        example().segment_rank[0] = 1


@pytest.mark.parametrize("column", ["segment_start", "segment_end", "tile_head_start", "tile_head_end"])
@pytest.mark.parametrize("change", [-1, 1])
def test_refuses_what_is_not_covered_once(column, change):
    plan = example()
    for at in range(len(getattr(plan, column))):
        values = getattr(plan, column).copy()
        values[at] += change
        with pytest.raises(PlanError, match="sequence"):
            replace(plan, **{column: values})


def test_refuses_overlapping_query_tiles():
    shape = {
        "lengths": [4],
        "homes": [0],
        "segments": [[(0, 0, 4)]],
        "world_size": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    Plan.from_placements(tiles=[[(0, 0, 2, 0, 3), (1, 0, 2, 3, 4)]], planner="", **shape)
    with pytest.raises(PlanError, match="overlap"):
        Plan.from_placements(tiles=[[(0, 0, 2, 0, 3), (1, 0, 2, 2, 3)]], planner="", **shape)
    with pytest.raises(PlanError, match="cover 6 of 8"):
        Plan.from_placements(tiles=[[(0, 0, 2, 0, 3)]], planner="", **shape)


def test_refuses_ranks_and_caps():
    plan = example()
    with pytest.raises(PlanError, match="on rank 7, but the plan has 3 ranks"):
        replace(plan, tile_rank=np.full_like(plan.tile_rank, 7))
    tokens = plan.rank_tokens
    assert tokens.sum() == 50
    replace(plan, max_tokens_per_rank=tuple(tokens.tolist()))
    with pytest.raises(PlanError, match=f"rank 0 holds {tokens[0]} tokens, its cap is {tokens[0] - 1}"):
        replace(plan, max_tokens_per_rank=tuple((tokens - 1).tolist()))


def test_refuses_what_does_not_fit_its_sequences_and_ranks():
    plan = example()
    with pytest.raises(PlanError, match=r"lengths must be in 0\.\.2147483647, got -3\.\.30"):
        replace(plan, lengths=np.where(plan.lengths == 0, -3, plan.lengths))
    with pytest.raises(PlanError, match="5 sequences needs as many homes, got 4"):
        replace(plan, homes=plan.homes[1:])
    with pytest.raises(PlanError, match="3 ranks needs as many caps, got 2"):
        replace(plan, max_tokens_per_rank=(99, 99))


@pytest.mark.parametrize("kind", ["segment", "tile"])
def test_refuses_offsets_that_fall_even_by_one(kind):
    plan = make_plan([[3, 4], [5]], planner="home")
    for offsets in ([0, 2, 1, 3], [0, 3, 0, 3], [1, 1, 2, 3], [-1, 1, 2, 3], [0, 1, 2, 2], [0, 1, 3]):
        with pytest.raises(PlanError, match=rf"{kind} offsets do not fit 3 sequences and 3 {kind}s"):
            replace(plan, **{f"{kind}_offsets": np.asarray(offsets)})


def test_refuses_heads_and_homes_that_no_step_has():
    plan = example()
    with pytest.raises(PlanError, match="5 heads, 2 key-value heads"):
        replace(plan, num_kv_heads=2)
    assert plan.homes.tolist() == [0, 0, 0, 2, 2]
    for homes in ([0, 0, 2, 0, 2], [0, 0, 0, 2, 3], [-1, 0, 0, 2, 2]):
        with pytest.raises(PlanError, match=r"home ranks must rise within 0\.\.2"):
            replace(plan, homes=np.asarray(homes, np.int32))


@pytest.mark.parametrize("kind", ["segment", "tile"])
def test_refuses_ranks_before_the_first(kind):
    plan = example()
    ranks = getattr(plan, f"{kind}_rank").copy()
    ranks[1] = -1
    with pytest.raises(PlanError, match=f"{kind} on rank -1, but the plan has 3 ranks"):
        replace(plan, **{f"{kind}_rank": ranks})


def test_places_these_lengths_on_these_ranks_and_no_others():
    plan, rows = example(), [[7, 0, 12], [], [1, 30]]
    assert plan.places(Lengths.from_ranks(rows))
    for others in ([[7, 0], [12], [1, 30]], [[7, 0, 12], [], [1, 30], []], [[7, 0, 12], [], [1, 31]]):
        assert not plan.places(Lengths.from_ranks(others)), others


def test_sequences_of_a_file_go_by_their_ids():
    plan = example()
    content = plan.to_dict()
    content["sequences"] = content["sequences"][::-1]
    assert Plan.from_dict(content) == plan
    for ids in ([4, 3, 2, 1, 1], [5, 4, 3, 2, 1], [0, 0, 2, 3, 4]):
        for sequence, i in zip(content["sequences"], ids, strict=True):
            sequence["id"] = i
        with pytest.raises(PlanError, match=r"sequence ids must be 0\.\.4, each once"):
            Plan.from_dict(content)


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(ConfigurationError, match=r"knapformer\.plan/1"):
        Plan.from_dict({"schema": "other"})
    content = example().to_dict()
    huge = json.loads(json.dumps(content))
    huge["sequences"][0]["length"] = 10**30
    with pytest.raises(ConfigurationError, match=r"a plan file: sequences\.0\.length: Input should be less than"):
        Plan.from_dict(huge)
    del content["sequences"][0]["home"]
    with pytest.raises(ConfigurationError, match=r"sequences\.0\.home: is missing"):
        Plan.from_dict(content)
    (tmp_path / "plan.json").write_text("[")
    with pytest.raises(ConfigurationError, match="is not JSON"):
        Plan.read(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="got 'rank x'"):
        parse_plan("plan p world=1 heads=1 kv=1\nrank x")


def test_other_head_counts():
    plan = random_plan([[9, 3]], 12, random.Random(3), split=1.0)
    for heads in (1, 5, 12, 40):
        other = plan.with_heads(heads)
        assert other.num_heads == heads
        assert np.array_equal(other.segment_rank, plan.segment_rank)
    assert plan.with_heads(12) is plan


def test_tiles_keep_their_share_of_other_heads():
    """Rounded to whole heads, halves up; a tile without a head is left out, and its queries with it."""
    tiles = [(0, 0, 5, 0, 9), (1, 5, 12, 0, 4), (0, 5, 12, 4, 9)]
    plan = Plan.from_placements(
        lengths=[9],
        homes=[0],
        segments=[[(0, 0, 9)]],
        tiles=[tiles],
        world_size=2,
        num_heads=12,
        num_kv_heads=6,
        planner="",
    )
    for heads, border in ((40, 17), (5, 2), (6, 3), (2, 1), (1, 0)):
        other = plan.with_heads(heads)
        expected = [(0, 0, border, 0, 9), (1, border, heads, 0, 4), (0, border, heads, 4, 9)]
        assert [tuple(tile) for tile in other.placement(0).tiles] == [t for t in expected if t[2] > t[1]]
        assert other.num_kv_heads == heads
    assert plan.with_heads(12, 3).num_kv_heads == 3
