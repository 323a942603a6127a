"""Checkpointing where ranks have tokens without heads, heads without tokens, both, or neither: collectives match."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from balanced_cases import TOLERANCE, Case, compare_all
from launch import run_ranks
from torch.autograd import Function

from knapformer.execution import exchange


def cases(num_heads: int) -> list[Case]:
    ways = [(None, False), ("block", False), ("attention", False), ("block", True)]
    return [
        Case(model, num_heads=num_heads, planner="apart", checkpoint=what, fsdp=fsdp, seed=3)
        for model, (what, fsdp) in product(("dit", "mmdit"), ways)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_under_checkpointing(world_size):
    tried = cases(num_heads=3)
    for case, *ranks in zip(tried, *run_ranks(compare_all, world_size, tried), strict=True):
        worst = max(max(errors.values()) for errors in ranks)
        assert worst <= TOLERANCE[case.dtype], f"{case}: {worst}"


class Forgetful(Function):
    """The end of an exchange as it is, but for the empty tensor: it is not saved for backward."""

    @staticmethod
    def forward(ctx: Any, pending: Any, token: Any) -> Any:
        ctx.pending, ctx.empty = pending, token.new_empty(0)
        unsaving = SimpleNamespace(
            save_for_backward=lambda _: None, mark_non_differentiable=ctx.mark_non_differentiable
        )
        return FINISH.forward(unsaving, pending, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return FINISH.backward(SimpleNamespace(pending=ctx.pending, saved_tensors=(ctx.empty,)), *gradients)


FINISH = exchange._Finish


def forget(rank: int, world_size: int, what: str | None) -> float:
    exchange._Finish = Forgetful
    (errors,) = compare_all(rank, world_size, [Case("dit", planner="apart", checkpoint=what, seed=3)])
    return max(errors.values())


def test_fails_without_the_saved_tensor():
    """The negative control: attention alone recomputed on two ranks, where gloo notices that collectives differ.

    With blocks recomputed on four ranks it hangs instead, and on two it goes unnoticed.
    """
    assert max(run_ranks(forget, 2, None)) < TOLERANCE[Case().dtype], "it is harmless without checkpointing"
    with pytest.raises(AssertionError, match=r"died with exit code|Connection reset|Connection closed|did not end"):
        run_ranks(forget, 2, "attention", timeout_s=20)
