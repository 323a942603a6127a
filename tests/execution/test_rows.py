"""Lookups of rows that many tokens share: values, and gradients summed in float32, in every order of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from knapformer.execution.rows import RowIndex, Run, add_gated, mean_by_row, modulate, rows, runs_of

HALF = (torch.bfloat16, torch.float16)
COUNTS = [40, 40, 0, 100, 1, 70, 70, 70]
"""Tokens of each row: equal ones beside one another, none, and few."""


def index_of(kind: str) -> RowIndex | Tensor:
    index = RowIndex.from_counts(COUNTS)
    if kind == "runs":
        assert index.is_by_runs
        return index
    if kind == "tensor":
        return index.rows
    return index.rows[torch.randperm(len(index.rows), generator=torch.Generator().manual_seed(0))]


def test_runs_join_equal_neighbours():
    assert runs_of(COUNTS) == (Run(0, 2, 40), Run(3, 1, 100), Run(4, 1, 1), Run(5, 3, 70))
    assert runs_of([5, 5, 5], [2, 1, 0]) == (Run(2, 1, 5), Run(1, 1, 5), Run(0, 1, 5))
    assert runs_of([]) == runs_of([0, 0]) == ()


@pytest.mark.parametrize("by_runs", [True, False])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num_tokens", [512, 4096, 30_000])
def test_a_row_of_many_tokens_gets_the_sum_of_their_gradients(num_tokens, dtype, by_runs):
    """One token after another, bfloat16 stops at 256 and float16 at 2048; PyTorch's own lookup does."""
    index = RowIndex.from_counts([num_tokens])
    table = torch.zeros(1, 4, dtype=dtype, requires_grad=True)
    rows(table, index if by_runs else index.rows).sum().backward()
    expected = torch.tensor(float(num_tokens)).to(dtype)
    assert torch.equal(table.grad, expected.expand(1, 4))

    own = torch.zeros(1, 4, dtype=dtype, requires_grad=True)
    functional.embedding(index.rows, own).sum().backward()
    assert float(own.grad.max()) == min(num_tokens, 256 if dtype == torch.bfloat16 else 2048)


def operators() -> dict[str, tuple]:
    """Each operator, and the same as plain broadcasting of looked-up rows."""
    return {
        "rows": (lambda x, a, b, i: x * rows(a, i), lambda x, a, b, i: x * a[i]),
        "modulate": (modulate, lambda x, a, b, i: x * (1 + b[i]) + a[i]),
        "add_gated": (
            lambda x, a, b, i: add_gated(x, x.sin(), b, i) + a.sum(),
            lambda x, a, b, i: x + b[i] * x.sin() + a.sum(),
        ),
    }


def values_and_gradients(operator, index, dtypes, wide: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(sum(COUNTS), 6), (len(COUNTS), 6), (len(COUNTS), 6)]
    given = [torch.randn(s, generator=generator).to(d).requires_grad_() for s, d in zip(shapes, dtypes, strict=True)]
    y = operator(*(x.double() if wide else x for x in given), index)
    return [y.detach(), *torch.autograd.grad((y * torch.arange(6)).sum(), given, materialize_grads=True)]


@pytest.mark.parametrize("kind", ["runs", "tensor", "unsorted"])
@pytest.mark.parametrize("name", ["rows", "modulate", "add_gated"])
def test_values_and_gradients_are_those_of_plain_lookups(name, kind):
    ours, plain = operators()[name]
    index = index_of(kind)
    token_rows = index.rows if isinstance(index, RowIndex) else index
    for dtypes, tolerance in (
        ([torch.float64] * 3, 1e-13),
        ([torch.float32] * 3, 1e-5),
        ([torch.bfloat16] * 3, 2e-2),
        ([torch.float32, torch.bfloat16, torch.bfloat16], 2e-2),
        ([torch.bfloat16, torch.float32, torch.float32], 2e-2),
    ):
        found = values_and_gradients(ours, index, dtypes, wide=False)
        wanted = values_and_gradients(plain, token_rows, dtypes, wide=True)
        for value, reference in zip(found, wanted, strict=True):
            assert float((value - reference).norm()) <= tolerance * float(reference.norm()), dtypes


@pytest.mark.parametrize("kind", ["runs", "tensor"])
def test_no_tokens_and_no_rows(kind):
    for num_rows in (0, 3):
        index = RowIndex.from_counts([0] * num_rows)
        x, table = torch.zeros(0, 4, requires_grad=True), torch.ones(num_rows, 4, requires_grad=True)
        modulate(x, table, table, index if kind == "runs" else index.rows).sum().backward()
        assert torch.equal(table.grad, torch.zeros(num_rows, 4))


def test_sums_do_not_depend_on_autocast():
    table = torch.zeros(3, 4, requires_grad=True)
    x = torch.full((3000, 4), 1 + 2**-12)
    with torch.autocast("cpu", torch.bfloat16):
        (rows(table, RowIndex.from_counts([1000] * 3)) * x).sum().backward()
    assert torch.equal(table.grad, torch.full((3, 4), 1000 * (1 + 2**-12)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_mean_by_row(dtype):
    index = RowIndex.from_counts(COUNTS)
    x = torch.randn(sum(COUNTS), 3, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    mean = mean_by_row(x, index, torch.tensor(COUNTS))
    parts = x.double().split(COUNTS)
    wanted = torch.stack([part.mean(0) if len(part) else part.new_zeros(3) for part in parts])
    assert float((mean - wanted).norm().detach()) <= (1e-14 if dtype == torch.float64 else 4e-3) * float(wanted.norm())
    weights = torch.arange(24.0).view(8, 3)
    (found,) = torch.autograd.grad((mean * weights).sum(), x)
    (reference,) = torch.autograd.grad((wanted * weights).sum(), x)
    assert float((found - reference).norm()) <= (1e-14 if dtype == torch.float64 else 4e-3) * float(reference.norm())
