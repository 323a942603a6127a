"""A Balancer and its steps in one process, or beside others: what it was told reaches the plan, or is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

from knapformer import Balancer, CapacityError, ConfigurationError, CostModel, LengthsError, Machine, Plan, Topology
from knapformer.execution.transport import GroupTransport
from knapformer.given.lengths import Lengths
from knapformer.plans.planners import make_plan

COST = CostModel(hidden=24, num_heads=6, gamma=1000.0)


def test_key_value_heads_reach_the_plan():
    assert Balancer(COST, num_kv_heads=2).prepare([3, 4]).plan.num_kv_heads == 2
    assert Balancer(COST).prepare([3, 4]).plan.num_kv_heads == 6
    parts = Balancer(COST, num_kv_heads=3).prepare_micro_batches([[3], [4]])
    assert [part.step.plan.num_kv_heads for part in parts] == [3, 3]


def test_bags_of_more_ranks_than_there_are_are_refused():
    with pytest.raises(ConfigurationError, match="a world of 1 ranks is not a multiple of the 2 ranks"):
        Balancer(COST, topology="g2n1")


def test_micro_steps_keep_caps_that_a_split_by_work_alone_would_not():
    """One video works as long as seven images have it: by work alone they would all run together, 140 tokens."""
    assert float(COST.work_s([60])[0]) > 7 * float(COST.work_s([20])[0])
    loaded = [[60, *[20] * 3], [20] * 4]
    sizes = [
        part.step.lengths.num_tokens for part in Balancer(COST, max_tokens_per_rank=None).prepare_micro_batches(loaded)
    ]
    assert sorted(sizes) == [60, 140]
    parts = Balancer(COST, planner="whole", max_tokens_per_rank=100).prepare_micro_batches(loaded)
    assert [part.step.lengths.num_tokens for part in parts] == [100, 100]
    assert all(part.step.plan.max_tokens_per_rank == (100,) for part in parts)
    with pytest.raises(CapacityError, match="200 tokens, max_tokens_per_rank allows 99 in each of 2"):
        Balancer(COST, planner="whole", max_tokens_per_rank=99).prepare_micro_batches(loaded)


def test_ragged_conditioning_of_micro_steps_is_that_of_their_sequences():
    loaded, rows = [[60, 5, 7], [9, 30]], [1, 0, 2, 4, 3]
    seen: list[int] = []
    for step, chosen in Balancer(COST).prepare_micro_batches(loaded, conditioning={"context": rows}):
        assert [step.conditioning_lengths("context")[i] for i in step.sequence_ids.argsort()] == [
            rows[i] for i in chosen
        ]
        context = torch.cat([torch.full((rows[i], 1), i) for i in chosen])
        assert torch.equal(step.route_conditioning(context, name="context"), context)
        seen += chosen
    assert sorted(seen) == [0, 1, 2, 3, 4]


def test_streams_of_unnamed_lengths_are_refused():
    step = Balancer(COST).prepare([3, 4])
    with pytest.raises(ConfigurationError, match=r"needs lengths with streams 'text' and 'visual', got \[\]"):
        _ = step.streams
    other = Balancer(COST).prepare({"text": [1], "audio": [2]})
    with pytest.raises(ConfigurationError, match=r"'text' and 'visual', got \['text', 'audio'\]"):
        _ = other.streams


def test_conditioning_that_prepare_was_not_told_of_is_refused():
    step = Balancer(COST).prepare([3, 4], conditioning={"context": [1, 2]})
    for call in (
        lambda: step.route_conditioning(torch.ones(2, 1), name="text"),
        lambda: step.conditioning_lengths("text"),
    ):
        with pytest.raises(ConfigurationError, match=r"no conditioning 'text': prepare was told of \['context'\]"):
            call()


@pytest.mark.parametrize("method", ["route", "restore", "route_conditioning"])
def test_nothing_to_move_and_scalars_are_refused(method):
    move = getattr(Balancer(COST).prepare([1]), method)
    with pytest.raises(ConfigurationError, match="at least one tensor"):
        move()
    with pytest.raises(LengthsError, match=r"a tensor of 1 rows, got shape \(\)"):
        move(torch.tensor(3.0))
    assert move(torch.tensor([3.0])).tolist() == [3.0]


def test_a_planner_of_ones_own_sees_the_lengths_and_its_plan_is_used():
    seen = []

    def plan(lengths) -> Plan:
        seen.append(lengths.to_lists())
        return Balancer(COST, planner="whole").plan(lengths)

    assert Balancer(COST, planner=plan).prepare([3, 4]).plan.planner == "whole"
    assert seen == [[[3, 4]]]


def nodes_seen(rank: int, _world_size: int) -> tuple[list[int], list[int]]:
    """Groups of two ranks on nodes of three, once as parts of the world and once as a group that is given."""
    seen: list[list[int]] = []
    given = [dist.new_group(ranks) for ranks in ([0], [1, 2, 3])][rank > 0]
    options: dict[str, Any]
    for options in ({"topology": Topology.parse("g2n1", ranks_per_node=3)}, {"group": given}):
        balancer = Balancer(replace(COST, machine=Machine(ranks_per_node=3)), planner="home", **options)
        seen.append(balancer.cost.machine.rank_nodes(balancer.group.size).tolist())
        balancer.prepare([3])
    return seen[0], seen[1]


def test_the_planner_sees_the_nodes_on_which_the_ranks_sit():
    first, second = ([0, 0], [0]), ([0, 1], [0, 0, 1])
    assert run_ranks(nodes_seen, 4) == [first, ([0, 0], [0, 0, 1]), second, second]


def test_a_tensor_on_another_kind_of_device_is_refused():
    step = Balancer(COST).prepare([1])
    assert step.route(torch.empty(1, 2, device="meta")).device.type == "meta", "alone, any device will do"
    step._moves.channel = replace(step._moves.channel, transport=GroupTransport(None))  # type: ignore[arg-type]  # never used
    with pytest.raises(ConfigurationError, match="rank 0: expected a tensor on cpu, got meta"):
        step.route(torch.empty(1, 2, device="meta"))


def test_the_effort_reaches_the_plan_or_is_refused():
    """A hundred equal sequences on 64 ranks, planned by one of them: what little is tried makes another plan."""
    lengths = Lengths.from_ranks([[4096, 4096]] * 36 + [[4096]] * 28)
    fast, default = (Balancer(CostModel(), effort=effort).plan(lengths) for effort in ("fast", "default"))
    assert fast.digest() == make_plan(lengths, effort="fast").digest()
    assert default.digest() == make_plan(lengths).digest() == Balancer(CostModel()).plan(lengths).digest()
    assert fast.digest() != default.digest()
    with pytest.raises(ConfigurationError, match="effort must be one of fast, default, thorough, got 'best'"):
        Balancer(COST, effort="best")
