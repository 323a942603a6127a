"""``knapformer bench``: the demo with everything settable, also under torchrun."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from knapformer.cli.demo import compare
from knapformer.cli.options import MOST_RANKS, Compared
from knapformer.demo.config import (
    CHECKPOINTS,
    DEMO_CODES,
    DEMO_STEPS,
    DTYPES,
    MOST_BENCH_STEPS,
    MOST_BLOCKS,
    MOST_TEXT_TOKENS,
    MOST_WIDTH,
)
from knapformer.given.shapes import DEMO_HEAD_WIDTH, DEMO_HEADS, stand_in_shape

BENCH_FILE = Path("runs/bench.json")

MOST_TORCH_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Model:
    """The MMDiT that is trained."""

    heads: Annotated[int, typer.Option(help="Attention heads.", min=1, max=MOST_WIDTH)] = DEMO_HEADS
    head_width: Annotated[int, typer.Option(help="Channels of a head.", min=1, max=MOST_WIDTH)] = DEMO_HEAD_WIDTH
    double_blocks: Annotated[int, typer.Option(help="Double-stream blocks.", min=0, max=MOST_BLOCKS)] = 1
    single_blocks: Annotated[int, typer.Option(help="Single-stream blocks.", min=0, max=MOST_BLOCKS)] = 1


@dataclass(frozen=True, slots=True)
class Training:
    """How it is trained."""

    steps: Annotated[int, typer.Option(help="Steps of each planner.", min=1, max=MOST_BENCH_STEPS)] = DEMO_STEPS
    warmup_steps: Annotated[int, typer.Option(help="First steps that are not timed.", min=0, max=MOST_BENCH_STEPS)] = 2
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = DTYPES[0]
    checkpoint: Annotated[str, typer.Option(help=f"What is recomputed: {', '.join(CHECKPOINTS)}.")] = CHECKPOINTS[0]
    shard_size: Annotated[
        int | None, typer.Option(help="Ranks over which FSDP2 shards the parameters.", min=1, max=MOST_RANKS)
    ] = None
    reshard: Annotated[bool, typer.Option(help="Free a block's parameters between its passes.")] = True
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = 1e-3
    max_text_tokens: Annotated[int, typer.Option(help="Longer captions are cut.", min=1, max=MOST_TEXT_TOKENS)] = 48
    overlap: Annotated[bool, typer.Option(help="Attend to whole sequences during the exchange.")] = True
    cost: Annotated[Path | None, typer.Option(help="A cost file; without it the bench calibrates first.")] = None
    seed: Annotated[int, typer.Option(help="Of samples and initial parameters.", min=0, max=MOST_TORCH_SEED)] = 0


def bench(
    model: Model,
    training: Training,
    compared: Compared,
    codes: Annotated[str, typer.Option(help="Data codes or one of KnapFormer's scenarios.")] = DEMO_CODES,
    ranks: Annotated[
        int | None,
        typer.Option(help="Processes to start; torchrun's own where it started them.", min=1, max=MOST_RANKS),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file; the page goes beside it.")] = BENCH_FILE,
) -> None:
    """The demo with everything settable; under torchrun it uses the ranks that it is given."""
    from knapformer.demo.config import TrainConfig, default_planners
    from knapformer.demo.launch import default_num_ranks, given_num_ranks

    num_ranks = (given_num_ranks() or default_num_ranks()) if ranks is None else ranks
    config = TrainConfig(
        codes=codes,
        planners=tuple(compared.specs) or default_planners(num_ranks),
        num_heads=model.heads,
        head_width=model.head_width,
        num_double_blocks=model.double_blocks,
        num_single_blocks=model.single_blocks,
        steps=training.steps,
        warmup_steps=training.warmup_steps,
        dtype=training.dtype,
        checkpoint=training.checkpoint,
        shard_size=training.shard_size,
        reshard_after_forward=training.reshard,
        learning_rate=training.learning_rate,
        max_text_tokens=training.max_text_tokens,
        max_tokens_per_rank=compared.cap,
        overlap=training.overlap,
        cost=None if training.cost is None else _cost(training.cost, model, training),
        seed=training.seed,
    )
    compare(config, num_ranks, output)


def _cost(file: Path, model: Model, training: Training) -> dict[str, Any]:
    """A cost file's content as the trained model's, if it is of its layers, dtype and device, as far as it says."""
    from knapformer.given.cost_files import CostFile
    from knapformer.measure.environment import environment

    found = CostFile.read(file)
    num_layers = model.double_blocks + model.single_blocks
    shape = stand_in_shape(num_heads=model.heads, head_width=model.head_width, num_layers=num_layers)
    cost = found.for_shape(shape, "the trained model")
    if found.measured.dtype is not None:
        found.check_measured({"dtype": training.dtype})
    if found.device is not None:
        found.check_measured({}, environment()["device"])
    return cost.to_dict()
