"""Long sequences in reduced precision: no further from float32 than diffusers' own forward in the same precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import precision_cases as cases
from launch import run_ranks

from knapformer.adapters import FAMILIES
from knapformer.execution import rows

WORST = 2.0
"""For single tensors: with so few draws their errors vary by more than ``cases.ALLOWED``; with 16 they do not."""


def assert_as_good(found: list[cases.Row]) -> None:
    assert found
    for row in found:
        assert row.ours <= cases.ALLOWED * row.original, row
        assert row.worst <= WORST, row
        assert row.spread <= cases.ALLOWED, row


@pytest.mark.parametrize("name", cases.MAIN_CASES.values())
def test_errors_are_those_of_the_original(name: str) -> None:
    assert_as_good(cases.compare([name], ["bfloat16"], [1024], num_draws=6))
    assert_as_good(cases.compare([name], ["float16", "autocast"], [256], num_draws=6))


def test_sums_in_the_dtype_itself_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: PyTorch's own lookup, which adds one token after another in bfloat16."""

    def in_own_dtype(x: torch.Tensor, index: rows.RowIndex, num_rows: int) -> torch.Tensor:
        return torch.ops.aten.embedding_dense_backward(x, index.rows, num_rows, -1, False)

    monkeypatch.setattr(rows, "_sum_by_row", in_own_dtype)
    (row,) = cases.compare(["hunyuan-video"], ["bfloat16"], [4096], num_draws=1)
    assert row.ours > 2 * cases.ALLOWED * row.original and row.worst > 2 * WORST, row


def under_three_plans(rank: int, _world: int) -> list[cases.Row]:
    families = ["flux", "wan", "hunyuan-video"]
    return cases.compare(families, ["bfloat16"], [1024], (0, 1, 2), num_draws=2, is_home=rank == 0)


def test_plans_differ_by_no_more_than_rounding() -> None:
    preload: list[Any] = ["torch.distributed.fsdp", *FAMILIES.values()]
    for found in run_ranks(under_three_plans, 2, timeout_s=120, preload=preload):
        assert_as_good(found)
        assert max(row.spread for row in found) > 0
