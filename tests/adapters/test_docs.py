"""The integration shown in README.md and docs/diffusers.md runs as it stands, on two ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from family_cases import flux, flux_sample
from launch import run_ranks
from torch.nn.parallel import DistributedDataParallel

from knapformer.adapters import FAMILIES

ROOT = Path(__file__).parents[2]


def examples() -> set[str]:
    texts = ((ROOT / name).read_text() for name in ("README.md", "docs/diffusers.md"))
    blocks = (block.split("```")[0] for text in texts for block in text.split("```python\n")[1:])
    return {block for block in blocks if "balance(transformer" in block}


def batch(ids: list[int]) -> SimpleNamespace:
    samples = [flux_sample(i) for i in ids]

    def listed(name: str) -> list[Any]:
        return [x.float() if torch.is_floating_point(x) else x for x in (sample[name] for sample in samples)]

    return SimpleNamespace(
        noisy=listed("hidden_states"),
        text=listed("encoder_hidden_states"),
        pooled=listed("pooled_projections"),
        timestep=listed("timestep"),
        img_ids=listed("img_ids"),
        guidance=listed("guidance"),
        target=[x + 1 for x in listed("hidden_states")],
    )


def run(rank: int, _world_size: int, folder: str, example: str) -> tuple[float, int]:
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "name": folder,
        "loader": [batch([0, 1, 3] if rank == 0 else [2])],
    }
    exec(example, names)
    with_grad = [p for p in names["transformer"].parameters() if p.grad is not None]
    return float(names["loss"]), len(with_grad)


def test_example_runs(tmp_path: Path) -> None:
    flux().float().save_pretrained(tmp_path / "transformer")
    preload = ["torch.distributed", *FAMILIES.values()]
    assert examples()
    for example in examples():
        assert len(example.splitlines()) <= 12
        found = run_ranks(run, 2, str(tmp_path), example, timeout_s=90, preload=preload)
        assert all(loss > 0 and num_gradients > 50 for loss, num_gradients in found)


def test_the_readme_starts_with_the_shortest_example() -> None:
    """Its lines are those of the program, but for the weights and the batches."""
    section = (ROOT / "README.md").read_text().split("## In your training loop")[1]
    block = section.split("```python\n")[1].split("```")[0]
    program = (ROOT / "examples/flux_ddp.py").read_text().splitlines()
    lines = [line.split("  #")[0].strip() for line in block.splitlines() if line]
    other = [line for line in lines if not any(own.strip().startswith(line) for own in program)]
    assert [line.split("(")[0] for line in other] == [
        "transformer = FluxTransformer2DModel.from_pretrained",
        "for batch in loader:",
        "output = model",
        "loss = output.loss",
    ]
