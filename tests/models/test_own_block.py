"""The block that docs/how-it-works.md shows runs balanced as in one process that holds all sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks
from torch import nn
from torch.nn import functional as F

from knapformer import Balancer, CostModel
from knapformer.models import local_attention

PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"
WIDTH, HEADS = 24, 3
LENGTHS = [[70, 5, 0, 31] + [3] * 17, [], [9]]
"""Of three ranks; the second one has no rows at home."""


def to_complex(z: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(z.unflatten(-1, (-1, 2)))


def source() -> str:
    """The block, whose helper stands in the sentence below it."""
    text = PAGE.read_text()
    assert "`to_complex = lambda z: torch.view_as_complex(z.unflatten(-1, (-1, 2)))`" in text
    return next(b.split("```")[0] for b in text.split("```python\n")[1:] if "class SingleStreamBlock" in b)


def made(code: str) -> Any:
    names: dict[str, Any] = {"nn": nn, "F": F, "torch": torch, "to_complex": to_complex}
    exec(code, names)
    torch.manual_seed(0)
    return names["SingleStreamBlock"](WIDTH, HEADS).double()


def inputs(sample: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, position ids and conditioning of one sequence."""
    random = torch.Generator().manual_seed(sample)
    draw = {"generator": random, "dtype": torch.float64}
    return torch.randn(length, WIDTH, **draw), torch.arange(length)[:, None], torch.randn(1, WIDTH, **draw)


def rotation_of(ids: torch.Tensor) -> torch.Tensor:
    angle = ids * torch.linspace(1, 0.1, WIDTH // HEADS // 2, dtype=torch.float64)
    return torch.polar(torch.ones_like(angle), angle)[:, None]


def packed(ids: range, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = [inputs(-1, 0), *(inputs(i, n) for i, n in zip(ids, lengths, strict=True))]
    rows, places, conditioning = (torch.cat(column) for column in zip(*parts, strict=True))
    return rows, places, conditioning[1:]


def loss_of(
    block: Any, x: torch.Tensor, c: torch.Tensor, ids: torch.Tensor, index: torch.Tensor, attention: Any
) -> Any:
    return block(x, c, rotation_of(ids), index, attention).sin()


def balanced(rank: int, _world: int, code: str, planner: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    block = made(code)
    first = sum(map(len, LENGTHS[:rank]))
    x, ids, c = packed(range(first, first + len(LENGTHS[rank])), LENGTHS[rank])
    step = Balancer(CostModel(hidden=WIDTH, num_heads=HEADS), planner=planner).prepare(LENGTHS[rank])
    rows, places, conditioning = step.route(x), step.route(ids), step.route_conditioning(c)
    y = step.restore(loss_of(block, rows, conditioning, places, step.sequence_index, step.attention))
    y.sum().backward()
    for p in block.parameters():
        torch.distributed.all_reduce(p.grad)
    return y.detach(), [p.grad for p in block.parameters()]


def check(code: str, planner: str) -> None:
    whole = [length for own in LENGTHS for length in own]
    block = made(code)
    x, ids, c = packed(range(len(whole)), whole)
    index = torch.as_tensor(np.repeat(np.arange(len(whole)), whole))
    y = loss_of(block, x, c, ids, index, local_attention(whole))
    y.sum().backward()
    ranks = run_ranks(balanced, 3, code, planner)
    torch.testing.assert_close(torch.cat([own for own, _ in ranks]), y.detach(), rtol=1e-10, atol=1e-10)
    for _, gradients in ranks:
        for found, parameter in zip(gradients, block.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("planner", ["ulysses", "home"])
def test_the_block_of_the_documentation(planner: str) -> None:
    """``home`` leaves one rank with zero rows in every layer."""
    assert len([line for line in source().splitlines() if line.strip()]) <= 20
    check(source(), planner)


def test_the_trap_of_zero_rows_is_one() -> None:
    trap = source().replace(".flatten(1), F.gelu", ".reshape(x.shape[0], -1), F.gelu")
    assert trap != source()
    with pytest.raises(Exception, match="cannot reshape tensor of 0 elements"):
        check(trap, "home")


def test_another_sequences_conditioning_is_seen() -> None:
    wrong = source().replace("[sequence_index].chunk", "[sequence_index.flip(0)].chunk")
    assert wrong != source()
    with pytest.raises(AssertionError):
        check(wrong, "ulysses")
