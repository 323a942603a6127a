"""``knapformer advise``: what balancing would gain on a data set of one's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import progress_bar, stamp, write_json
from knapformer.cli.options import MOST_NODE, MOST_RANKS, MOST_SEED, MOST_STEPS, MOST_TOKENS, Printed, Target
from knapformer.errors import ConfigurationError
from knapformer.given.shapes import ModelShape
from knapformer.predict.advise import Advice
from knapformer.predict.subject import BY_OPTION, Subject, require_shape

MOST_GB = 1_000_000


@dataclass(frozen=True, slots=True)
class Loading:
    """What a step of the data set is."""

    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks with fast links among them.", min=1, max=MOST_NODE)
    ] = None
    memory_gb: Annotated[float | None, typer.Option(help="Of a rank; the hardware's without.")] = None
    tokens_per_rank: Annotated[int | None, typer.Option(help="Tokens that a rank loads.", min=1, max=MOST_TOKENS)] = (
        None
    )
    steps: Annotated[int, typer.Option(help="Steps to draw.", min=2, max=MOST_STEPS)] = 20
    seed: Annotated[int, typer.Option(help="Equal seeds give equal steps.", min=0, max=MOST_SEED)] = 0


def advise(
    lengths: Annotated[Path, typer.Argument(help="CSV or Parquet with length, or width, height, frames; or lengths.")],
    ranks: Annotated[int, typer.Option(help="Ranks that balance together.", min=1, max=MOST_RANKS)],
    target: Target,
    loading: Loading,
    printed: Printed,
) -> None:
    """Say what balancing would gain on a data set of your own, and how to set it up."""
    from knapformer.predict.advise_page import advice_lines, advice_table

    if loading.memory_gb is not None and not 0 < loading.memory_gb <= MOST_GB:
        raise ConfigurationError(f"--memory-gb must be a number above 0, {MOST_GB} at most, got {loading.memory_gb}")
    subject = target.subject()
    shape = require_shape(subject, "advise")
    if loading.ranks_per_node is not None:
        subject = replace(subject, cost=subject.cost.with_machine(ranks_per_node=loading.ranks_per_node))
    if loading.memory_gb is not None:
        device = replace(subject.device, name=f"{loading.memory_gb:g} GB", memory_bytes=1e9 * loading.memory_gb)
        subject = replace(subject, device=device, device_chosen=BY_OPTION)
    shard_size = target.shards(subject, ranks)
    advice = _advice(read_tokens(lengths, shape), ranks, subject, shard_size, loading)
    content = {**advice.to_dict(), **stamp(), **subject.describe(), "hardware": target.named_hardware}
    if printed.output is not None:
        write_json(printed.output, content)
    if printed.as_json:
        print(json.dumps(content))
        return
    console = Console()
    console.print(advice_table(advice))
    for line in advice_lines(advice, subject, shard_size=shard_size):
        console.print(line, soft_wrap=True, highlight=False)


def _advice(tokens: Any, ranks: int, subject: Subject, shard_size: int, loading: Loading) -> Advice:
    from knapformer.predict import advise as advisor
    from knapformer.predict.simulate import setting_for

    memory = subject.memory(shard_size)
    assert memory is not None
    with progress_bar("drawing steps", loading.steps * advisor.num_ways(ranks)) as on_step:
        return advisor.advise(
            tokens,
            setting_for(subject, memory, num_ranks=ranks),
            memory,
            num_ranks=ranks,
            memory_bytes=subject.device.memory_bytes,
            tokens_per_rank=loading.tokens_per_rank,
            num_steps=loading.steps,
            seed=loading.seed,
            on_step=on_step,
        )


def read_tokens(file: Path, shape: ModelShape) -> Any:
    """(S,) tokens of a data set's samples; see ``read_dataset``."""
    from knapformer.workloads.dataset import read_dataset

    tokens = read_dataset(file, shape)
    if not tokens.any():
        raise ConfigurationError(f"{file}: needs a sequence with tokens, got {len(tokens)} of length 0")
    return tokens
