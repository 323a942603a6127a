"""Blocks compiled with ``fullgraph=True`` while balanced: no break, few graphs, and the unbalanced run's gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from balanced_cases import TOLERANCE, Case
from compile_cases import WARM_UP, Compiled, Compiler, compare_compiled
from launch import run_ranks

from knapformer.execution.operator import in_order

CASES = [
    Case("mmdit", seed=100),
    Case("dit", seed=100, checkpoint="block", fsdp=True, lanes=2),
]
MOST_AFTER_WARM_UP = 2


@pytest.fixture(scope="module")
def two_ranks() -> list[list[Compiled]]:
    return run_ranks(compare_compiled, 2, CASES, timeout_s=200)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["mmdit", "dit checkpointed sharded two lanes"])
def test_outputs_and_gradients_equal_the_unbalanced_run(two_ranks: list[list[Compiled]], number: int) -> None:
    for rank, found in enumerate(two_ranks):
        assert max(found[number].errors) <= TOLERANCE[torch.float64], f"rank {rank}: {found[number].errors}"
    assert min(min(found[number].rows) for found in two_ranks) == 0, "no step leaves a rank without rows"


@pytest.mark.parametrize("number", range(len(CASES)), ids=["mmdit", "dit checkpointed sharded two lanes"])
def test_graphs_serve_all_steps(two_ranks: list[list[Compiled]], number: int) -> None:
    for found in two_ranks:
        assert found[number].breaks == 0
        assert found[number].num_runs >= len(found[number].graphs), "nothing was compiled"
        assert found[number].recompiled <= MOST_AFTER_WARM_UP, found[number].graphs


def test_other_numbers_of_rows_would_compile_anew() -> None:
    """The negative control: without ``any_number_of_rows`` 0 rows and 1 row have graphs of their own."""
    (found, *_), *_ = run_ranks(partial(compare_compiled, any_rows=False), 2, [Case("dit", seed=100)], timeout_s=200)
    assert found.graphs[-1] - found.graphs[WARM_UP - 1] > MOST_AFTER_WARM_UP, found.graphs


def test_the_whole_model_in_one_graph() -> None:
    """Of our own models; its graphs know more of a step, and are more."""
    for rank, (found,) in enumerate(
        run_ranks(partial(compare_compiled, whole=True, num_steps=3), 2, [Case("dit", seed=100)], timeout_s=200)
    ):
        assert max(found.errors) <= TOLERANCE[torch.float64], f"rank {rank}: {found.errors}"
        assert found.breaks == 0


def test_in_order_is_the_identity_and_gives_the_earlier_one_no_gradient() -> None:
    compiler = Compiler()

    def both(x: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        return in_order(x * 2, earlier * 3).sin() + earlier.cos()

    x, earlier = (torch.arange(6.0, dtype=torch.float64).view(3, 2).add(i).requires_grad_() for i in range(2))
    wanted = torch.autograd.grad(both(x, earlier).square().sum(), (x, earlier))
    out = torch.compile(both, **compiler.options)(x, earlier)
    found = torch.autograd.grad(out.square().sum(), (x, earlier))
    assert compiler.graphs == 1
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, wanted, strict=True))
