"""Law 3: balanced output and all gradients equal the unbalanced run's, whatever the plan, on gloo ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from balanced_cases import TOLERANCE, Case, compare_all
from launch import run_ranks

MODELS = ("dit", "mmdit")
CHECKPOINTS = (None, "block", "attention")


def cases(world_size: int) -> list[Case]:
    """Fewer of them on eight ranks, which take turns on a small machine."""
    many = world_size < 8
    fsdp = [(False, None), (True, None), *([(True, 2)] if world_size == 4 else [])]
    some = [
        Case(model, checkpoint=what, fsdp=sharded, shard_size=size, seed=world_size, num_heads=3 + world_size % 3)
        for model, what, (sharded, size) in product(MODELS, CHECKPOINTS if many else (None, "block"), fsdp)
    ]
    some += [
        Case(model, checkpoint=what, seed=world_size + 20, num_heads=5)
        for model, what in product(MODELS, CHECKPOINTS if many else ("attention",))
    ]
    some += [Case(model, num_heads=6, num_kv_heads=kv, seed=7) for model, kv in zip(MODELS, (2, 3), strict=True)]
    some += [Case("dit", num_heads=6, num_kv_heads=1, seed=7)] * many
    planners = ("home", "whole", "ulysses", "bags", "moldable") if many else ("bags", "moldable")
    some += [Case("mmdit", planner=planner, dtype=torch.float32, seed=world_size + 40) for planner in planners]
    some += [Case("dit", dtype=torch.float32, seed=world_size + 50 + i, checkpoint="block") for i in range(1 + many)]
    some += [
        Case(model, checkpoint=what, fsdp=sharded, seed=world_size + 70, num_heads=5, lanes=2)
        for model, what, sharded in product(MODELS, CHECKPOINTS if many else ("block",), (False, True))
    ]
    some += [
        Case(model, planner=name, lanes=2, seed=world_size + 80)
        for model, name in product(MODELS, ("moldable", "apart")[: min(2, world_size)])
    ]
    return [*some, Case(overlap=False, seed=world_size + 60)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_outputs_and_gradients_equal_the_unbalanced_run(world_size):
    tried = cases(world_size)
    found = run_ranks(compare_all, world_size, tried, timeout_s=280)
    for case, *ranks in zip(tried, *found, strict=True):
        for rank, errors in enumerate(ranks):
            name, worst = max(errors.items(), key=lambda item: item[1])
            assert worst <= TOLERANCE[case.dtype], f"{case}, rank {rank}, {name}: {worst}"


def test_notices_a_wrong_gradient():
    """The negative control: the gradient of one rank's conditioning scaled by 1.001, dropped, or permuted."""
    tried = [Case(model, wrong=wrong, seed=5) for model, wrong in product(MODELS, ("scale", "drop", "permute"))]
    for case, *ranks in zip(tried, *run_ranks(compare_all, 2, tried), strict=True):
        worst = max(max(errors.values()) for errors in ranks)
        assert worst > 100 * TOLERANCE[case.dtype], f"{case} went unnoticed: {worst}"
        assert all(errors["output"] <= TOLERANCE[case.dtype] for errors in ranks)
