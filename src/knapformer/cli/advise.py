"""``knapformer advise``: what balancing would gain on a data set of one's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import checked_shard_size, progress_bar, stamp, write_json
from knapformer.cli.options import DEFAULT_HARDWARE, DEFAULT_MODEL, Printed, Target
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel


@dataclass(frozen=True, slots=True)
class Loading:
    """What a step of the data set is."""

    ranks_per_node: Annotated[int | None, typer.Option(help="Ranks with fast links among them.", min=1)] = None
    memory_gb: Annotated[float | None, typer.Option(help="Of a rank; the hardware's without.")] = None
    tokens_per_rank: Annotated[int | None, typer.Option(help="Tokens that a rank loads.", min=1)] = None
    steps: Annotated[int, typer.Option(help="Steps to draw.", min=2)] = 20
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0)] = 0


def advise(
    lengths: Annotated[Path, typer.Argument(help="CSV or Parquet with length, or width, height, frames; or lengths.")],
    ranks: Annotated[int, typer.Option(help="Ranks that balance together.", min=1)],
    target: Target,
    loading: Loading,
    printed: Printed,
) -> None:
    """Say what balancing would gain on a data set of your own, and how to set it up."""
    from knapformer.predict.advise_page import advice_lines, advice_table
    from knapformer.predict.hardware import hardware

    if loading.memory_gb is not None and not 0 < loading.memory_gb < math.inf:
        raise ConfigurationError(f"--memory-gb must be a number above 0, got {loading.memory_gb}")
    advice, shard_size = _advice(lengths, ranks, target, loading)
    model, kind = target.model or DEFAULT_MODEL, target.hardware or DEFAULT_HARDWARE
    content = {**advice.to_dict(), **stamp(), "model": model, "hardware": str(target.cost or kind)}
    if printed.output is not None:
        write_json(printed.output, content)
    if printed.as_json:
        print(json.dumps(content))
        return
    console = Console()
    console.print(advice_table(advice))
    is_measured, name = target.cost is not None, hardware(kind).name
    for line in advice_lines(advice, device_name=name, is_measured=is_measured, shard_size=shard_size):
        console.print(line, soft_wrap=True, highlight=False)


def _advice(file: Path, ranks: int, target: Target, loading: Loading) -> tuple[Any, int]:
    """The advice, and the ranks over which parameters are sharded."""
    from knapformer.given.shapes import model_shape
    from knapformer.predict import advise as advisor
    from knapformer.predict.hardware import hardware
    from knapformer.predict.memory import MemoryModel
    from knapformer.predict.simulate import setting_of
    from knapformer.workloads.dataset import read_dataset

    model = target.model or DEFAULT_MODEL
    device, shape = hardware(target.hardware or DEFAULT_HARDWARE), model_shape(model)
    tokens = read_dataset(file, shape)
    if not tokens.any():
        raise ConfigurationError(f"{file}: needs a sequence with tokens, got {len(tokens)} of length 0")
    layer = device.cost(shape) if target.cost is None else CostModel.read(target.cost)
    if loading.ranks_per_node is not None:
        layer = layer.with_machine(ranks_per_node=loading.ranks_per_node)
    shard = checked_shard_size(target.shard_size, ranks, layer.machine.ranks_per_node)
    memory = MemoryModel.of_model(model, shape, shard_size=shard)
    with progress_bar("drawing steps", loading.steps * advisor.num_ways(ranks)) as on_step:
        advice = advisor.advise(
            tokens,
            setting_of(layer, device, memory, num_ranks=ranks),
            memory,
            num_ranks=ranks,
            memory_bytes=device.memory_bytes if loading.memory_gb is None else 1e9 * loading.memory_gb,
            tokens_per_rank=loading.tokens_per_rank,
            num_steps=loading.steps,
            seed=loading.seed,
            on_step=on_step,
        )
    return advice, shard
