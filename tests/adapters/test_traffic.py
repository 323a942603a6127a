"""What an adapter adds to a model that needs no balancing: bytes that operators read and write, counted."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("diffusers")

import traffic_cases as cases

from knapformer import Balancer
from knapformer.adapters import balance, cost_of
from knapformer.execution.rows import RowIndex

NAMES = ("flux", "wan", "qwen-image", "sd3", "sd3.5", "hunyuan-video")

ALLOWED = 1.03
"""Bytes over those of diffusers' own forward and backward pass. Measured: 0.93 to 1.01."""

SUMS = ("index_add", "index_put", "scatter_add", "scatter_reduce", "embedding_dense_backward")
"""Operators that add rows one by one, with atomics on CUDA, or sort them first."""


def counted(name: str, *, is_balanced: bool, sides: tuple[int, ...] = (cases.SIDE, cases.SIDE)) -> cases.OperatorBytes:
    """A forward and a backward pass over one image of each size."""
    model, samples = cases.build(name), [cases.sample(name, side) for side in sides]
    if is_balanced:
        balance(model, Balancer(cost_of(model)))
        given: dict[str, Any] = {key: [values[key] for values in samples] for key in samples[0]}
    else:
        given = cases.batched(samples)
    with cases.OperatorBytes() as found:
        output = model(**given)
        (output.rows if is_balanced else output.sample).square().sum().backward()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_reads_and_writes_what_the_original_does(name: str) -> None:
    assert counted(name, is_balanced=True).total <= ALLOWED * counted(name, is_balanced=False).total


def test_rows_copied_for_every_token_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowIndex, "is_by_runs", False)
    assert counted("flux", is_balanced=True).total > ALLOWED * counted("flux", is_balanced=False).total


@pytest.mark.parametrize("name", NAMES)
def test_no_operator_adds_rows(name: str) -> None:
    """Nor for images of several sizes."""
    found = counted(name, is_balanced=True, sides=(8, 16, 8, 12))
    assert found.calls and [call for call in found.calls if any(part in call for part in SUMS)] == []
