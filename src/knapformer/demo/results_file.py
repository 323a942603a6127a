"""The results file of ``demo`` and ``bench`` as pages read it: what it must hold, and within which bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from knapformer.demo.config import MOST_BENCH_RANKS, MOST_BENCH_STEPS
from knapformer.demo.results import SCHEMA
from knapformer.errors import ConfigurationError
from knapformer.given.files import checked_object, read_object

MOST_PLANNERS = 64
MOST_TEXT = 10_000

Amount = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Timed = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
Series = list[list[Amount | None]]
"""Of each rank, of each step; null where a step does not count."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class Config(_Part):
    """Of ``TrainConfig``, what a page shows."""

    steps: Annotated[int, Field(ge=1, le=MOST_BENCH_STEPS)]
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_BENCH_STEPS)]
    dtype: Text
    codes: Text


class Environment(_Part):
    """Where it ran."""

    device: Text
    torch: Text


class Row(_Part):
    """A planner's row of ``summarize``, as far as every page shows it."""

    step_s: Timed
    tokens_per_s: Amount
    samples_per_s: Amount
    predicted_discrepancy: Number
    measured_discrepancy: Number
    exchange_s: Amount
    megabytes: Amount
    speedup: Amount
    ideal_speedup: Amount
    of_ideal: Amount
    loss_difference: Amount


class Notes(_Part):
    """What the ranks noted under one planner."""

    step_s: Series
    busy_s: Series
    predicted_busy_s: Series
    exchange_s: Series
    loss: list[list[Number]]


class ResultsFile(_Part):
    """All of it."""

    created: Text
    num_ranks: Annotated[int, Field(ge=1, le=MOST_BENCH_RANKS)]
    config: Config
    environment: Environment
    planners: Annotated[dict[Text, Notes], Field(min_length=1, max_length=MOST_PLANNERS)]
    summary: Annotated[dict[Text, Row], Field(min_length=1, max_length=MOST_PLANNERS)]


def read_results(path: str | Path) -> dict[str, Any]:
    """A results file's content, as it stands.

    Raises:
        ConfigurationError: one line that names the place where it is not what a page needs.
    """
    content = read_object(path, "a results file")
    if content.get("schema") != SCHEMA:
        raise ConfigurationError(f"{path}: expected schema {SCHEMA!r}, got {str(content.get('schema'))[:60]!r}")
    found = checked_object(ResultsFile, content, str(path))
    if list(found.planners) != list(found.summary):
        raise ConfigurationError(f"{path}: summary: needs the rows of planners, in their order")
    if found.config.warmup_steps >= found.config.steps:
        raise ConfigurationError(
            f"{path}: config.warmup_steps: must be below {found.config.steps} steps, got {found.config.warmup_steps}"
        )
    for name, notes in found.planners.items():
        _check_series(notes, found, f"{path}: planners.{name}")
    return content


def _check_series(notes: Notes, found: ResultsFile, where: str) -> None:
    """Every series has the file's ranks and steps, and some step is timed."""
    num_ranks, steps = found.num_ranks, found.config.steps
    for measure in Notes.model_fields:
        ranks = getattr(notes, measure)
        if len(ranks) != num_ranks:
            raise ConfigurationError(f"{where}.{measure}: needs a list for each of {num_ranks} ranks, got {len(ranks)}")
        for rank, values in enumerate(ranks):
            if len(values) != steps:
                raise ConfigurationError(
                    f"{where}.{measure}.{rank}: needs a value for each of {steps} steps, got {len(values)}"
                )
    for measure in ("step_s", "busy_s"):
        for rank, values in enumerate(getattr(notes, measure)):
            if all(value is None for value in values[found.config.warmup_steps :]):
                raise ConfigurationError(f"{where}.{measure}.{rank}: needs a timed step after the warm-up")
