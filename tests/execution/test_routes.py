"""Units of tensors: as runs, as an index, and in one piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from knapformer.execution.routes import MIN_RUN_UNITS, Units, expand, expand_there, move
from knapformer.schedules.tokens import Blocks

CPU = torch.device("cpu")


def units(blocks: Blocks) -> list[int]:
    columns = (blocks.start, blocks.outer, blocks.outer_stride, blocks.inner, blocks.inner_stride)
    return [
        start + o * outer_stride + i * inner_stride
        for start, outer, outer_stride, inner, inner_stride in zip(*(c.tolist() for c in columns), strict=True)
        for o in range(outer)
        for i in range(inner)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_expands_blocks(seed):
    random = np.random.default_rng(seed)
    blocks = Blocks.of(*random.integers(0, 5, (5, random.integers(0, 6))))
    assert expand(blocks, CPU).tolist() == units(blocks)


def test_expands_on_another_device():
    """The same from runs of other strides, as an accelerator does it."""
    blocks = Blocks.of(np.array([3, 40, 7]), 1, 0, np.array([2, 0, 3]), np.array([5, 9, 1]))
    base = blocks.start - np.array([0, 2, 2]) * blocks.inner_stride
    table = torch.from_numpy(np.stack([base, blocks.inner_stride, blocks.inner]))
    assert expand_there(table, 5).tolist() == units(blocks) == [3, 8, 7, 8, 9]


LONG = Blocks.of_rows(np.array([70, 0, 130]), np.array([MIN_RUN_UNITS, 2 * MIN_RUN_UNITS, MIN_RUN_UNITS]))
SHORT = Blocks.of_rows(np.array([9, 0, 4]), np.array([2, 1, 3]))
PIECE = Blocks.of_rows(np.array([5, 45]), np.array([40, 60]))


@pytest.mark.parametrize(("blocks", "has_runs"), [(LONG, True), (SHORT, False), (PIECE, True)])
def test_takes_and_puts(blocks, has_runs):
    found, index = Units.of(blocks, CPU), torch.tensor(units(blocks))
    assert (found.runs is not None) == has_runs
    x = torch.arange(400.0).view(200, 2)
    part, put = x.new_empty(found.count, 2), torch.zeros_like(x)
    found.take(x, part)
    assert torch.equal(part, x[index])
    found.put(part, put)
    assert torch.equal(put, torch.zeros_like(x).index_copy(0, index, part))


@pytest.mark.parametrize("there", [Blocks.of_rows(np.array([0, 150]), np.array([96, 32])), Blocks.of(0, 1, 0, 128, 1)])
def test_moves_between_blocks_of_other_shapes(there):
    """Runs go one by one only where they are the same on both sides."""
    x = torch.arange(400.0).view(200, 2)
    out = torch.zeros_like(x)
    move(x, Units.of(LONG, CPU), out, Units.of(there, CPU))
    assert torch.equal(out[torch.tensor(units(there))], x[torch.tensor(units(LONG))])


def test_knows_what_is_one_piece():
    x = torch.arange(400.0).view(200, 2)
    assert torch.equal(Units.of(PIECE, CPU).bytes_of(x).view(torch.float32), x[5:105].flatten())
    assert Units.of(Blocks.of_rows(*np.zeros((2, 0), np.int64)), CPU).bytes_of(x).numel() == 0
    assert Units.of(LONG, CPU).bytes_of(x) is None
    starts = np.array([0, 3, 8, 10])
    assert Units.of(Blocks.of_rows(starts, np.array([3, 5, 2, 4])), CPU).span == (0, 14)
    for gap_or_overlap in ([3, 4, 2, 4], [3, 5, 3, 4], [2, 5, 2, 4]):
        assert Units.of(Blocks.of_rows(starts, np.array(gap_or_overlap)), CPU).span is None
    assert Units.of(Blocks.of_rows(np.array([0, 3, 6]), np.array([3, 2, 4])), CPU).span is None, (
        "a gap after equal steps"
    )
    assert Units.of(PIECE, CPU).bytes_of(x.T.contiguous().T) is None
    single = torch.zeros(1, 2)[:, 1:]
    assert Units.of(Blocks.of_rows(np.array([0]), np.array([1])), CPU).bytes_of(single).numel() == 4
