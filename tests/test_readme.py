"""The README's integration example runs as it stands, and trains as without balancing."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch import run_ranks

from knapformer import Balancer, CostModel
from knapformer.losses import loss_counts, reduce_loss, squared_error
from knapformer.models import MMDIT_PRESETS, MMDiT
from knapformer.parallel import checkpoint, shard

README = Path(__file__).parents[1] / "README.md"


def example() -> str:
    blocks = README.read_text().split("```python\n")[1:]
    return next(block.split("```")[0] for block in blocks if "balancer.prepare" in block)


def batches(rank: int, config: Any) -> list[SimpleNamespace]:
    random = torch.Generator().manual_seed(rank)
    found = []
    for text, visual in (([3, 5], [40, 4]), ([2], [7])) if rank == 0 else (([1], [6]), ([4, 4, 0], [9, 5, 2])):
        tokens = sum(text) + sum(visual)
        found.append(
            SimpleNamespace(
                text_lengths=text,
                visual_lengths=visual,
                noisy=torch.randn(sum(visual), config.in_channels, generator=random),
                target=torch.randn(sum(visual), config.out_channels, generator=random),
                text=torch.randn(sum(text), config.text_channels, generator=random),
                position_ids=torch.randint(0, 30, (tokens, 3), generator=random),
                conditioning=torch.randn(len(text), config.conditioning_channels, generator=random),
            )
        )
    return found


def train(rank: int, _world_size: int, planner: str) -> list[float]:
    torch.manual_seed(0)
    config = MMDIT_PRESETS["tiny"]
    model = MMDiT(config)
    model.reset_parameters(init_std=0.1)
    model = shard(checkpoint(model))
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def noted(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        errors = squared_error(prediction, target)
        losses.append(float(errors.mean()))
        return errors

    names = {
        "Balancer": functools.partial(Balancer, planner=planner),
        "CostModel": CostModel,
        "loader": batches(rank, config),
        "loss_counts": loss_counts,
        "model": model,
        "optimizer": optimizer,
        "reduce_loss": reduce_loss,
        "squared_error": noted,
    }
    exec(example(), names)
    return losses


def test_the_integration_example():
    assert len([line for line in example().splitlines() if line.strip()]) <= 12
    balanced, unbalanced = (run_ranks(train, 2, planner) for planner in ("ulysses", "home"))
    for own, reference in zip(balanced, unbalanced, strict=True):
        assert len(own) == 2
        assert own == pytest.approx(reference, rel=1e-5)
        assert abs(own[1] - reference[0]) > 1e-3
