"""The memory model against measured peaks of steps whose attention is exchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from launch import run_ranks

from knapformer import Balancer, CostModel
from knapformer.measure.memory_probe import peak_bytes
from knapformer.models import MMDiT, StreamIndex
from knapformer.models.presets import make_config
from knapformer.parallel import checkpoint
from knapformer.predict.fitting import peak_memory_bytes
from knapformer.predict.memory import MemoryModel

CPU = torch.device("cpu")
CHANNELS = 48
CASES = [
    # ranks, planner, heads, head width, double blocks, single blocks, lengths of the first rank, recompute
    (2, "ulysses", 4, 32, 2, 2, [1024, 512], "none"),
    (2, "ulysses", 4, 32, 2, 2, [1024, 512], "block"),
    (2, "ulysses", 8, 16, 1, 1, [768], "block"),
    (4, "ulysses", 6, 32, 0, 3, [1600], "none"),
    (2, "moldable", 4, 32, 2, 2, [1500, 100, 100], "block"),
    (3, "moldable", 6, 32, 1, 2, [2000, 64, 64], "none"),
]
"""Few ranks: what they hold fits, and their plans split most tokens."""


def measured_and_predicted(rank: int, _world: int, case: tuple) -> tuple[float, float, float]:
    """Peaks of this rank: as measured, as predicted of the fullest rank, and that without exchanges."""
    _, planner, heads, head_width, doubles, singles, lengths, recompute = case
    config = make_config(
        num_heads=heads, head_width=head_width, num_double_blocks=doubles, num_single_blocks=singles, text_channels=48
    )
    config = replace(config, in_channels=CHANNELS, out_channels=CHANNELS)
    model = MMDiT(config)
    model.reset_parameters(init_std=0.02)
    if recompute == "block":
        checkpoint(model, what="block")
    balancer = Balancer(CostModel(hidden=config.width, num_heads=heads), planner=planner, max_tokens_per_rank=None)
    step = balancer.prepare(lengths if rank == 0 else [32])
    counts = step.local_lengths.tolist()
    arguments = (
        torch.full((step.num_tokens, CHANNELS), 0.5),
        torch.zeros(0, 48),
        torch.zeros(step.num_tokens, 3, dtype=torch.int64),
        torch.full((len(counts), config.conditioning_channels), 0.5),
        step.sequence_index,
        StreamIndex.from_lengths([0] * len(counts), counts),
    )

    def run() -> None:
        model(*arguments, attention=step.attention).square().mean().backward()

    memory = MemoryModel(
        parameters=sum(p.numel() for p in model.parameters()),
        blocks=["double"] * doubles + ["single"] * singles,
        width=config.width,
        mlp_width=config.mlp_width,
        io_channels=CHANNELS,
        recompute=recompute,
        bytes_per_element=4,
        shard_size=1,
        state_bytes_per_parameter=4,
    )
    fullest = peak_memory_bytes(step.plan, memory)
    return peak_bytes(run, CPU), fullest, memory.peak_bytes(int(step.plan.rank_tokens.max()))


def peaks(case: tuple) -> tuple[float, float, float]:
    found = run_ranks(measured_and_predicted, case[0], case)
    return max(measured for measured, _, _ in found), *found[0][1:]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_exchanges_are_within_a_tenth_of_the_measured_peak(case: tuple) -> None:
    measured, predicted, _ = peaks(case)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_model_without_exchanges_would_be_noticed() -> None:
    measured, _, without = peaks(CASES[-1])
    assert without != pytest.approx(measured, rel=0.1)
