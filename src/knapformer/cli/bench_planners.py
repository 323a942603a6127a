"""``knapformer bench-planners``: every planner on the same steps."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from knapformer.cli.common import progress_bar, write_json
from knapformer.cli.options import MOST_RANKS
from knapformer.errors import ConfigurationError
from knapformer.plans.registry import check_installed
from knapformer.version import __version__

MOST_SEEDS, MOST_SEED_DIGITS = 1000, 9


def bench_planners(
    only: Annotated[str, typer.Option(help="Words by comma; scenarios whose name contains one of them.")] = "",
    max_ranks: Annotated[int, typer.Option(help="Leave out larger scenarios.", min=1, max=MOST_RANKS)] = 1024,
    seeds: Annotated[str, typer.Option(help="first-last")] = "0-8",
    cp_sat: Annotated[bool, typer.Option("--cp-sat", help="With the CP-SAT reference on 8 ranks (OR-tools).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file to write.")] = None,
) -> None:
    """Compare planners and simpler rules on the workloads, 8 to 1024 ranks, on the modelled machine."""
    from knapformer.predict.planner_table import SCENARIOS, planner_table
    from knapformer.predict.planner_table import bench_planners as run

    if cp_sat:
        check_installed("cp-sat")
    words = [word for word in only.split(",") if word]
    chosen = [s for s in SCENARIOS if not words or any(word in s.workload for word in words)]
    chosen = [s for s in chosen if s.lengths(0, 0).num_ranks <= max_ranks]
    if not chosen:
        known = ", ".join(dict.fromkeys(s.workload for s in SCENARIOS))
        raise ConfigurationError(f"no scenario of up to {max_ranks} ranks matches {only!r}; known: {known}")
    numbers, rows = seeds_of(seeds), []
    with progress_bar("planners compared", None) as on_row:
        for row in run(chosen, numbers, cp_sat):
            rows.append(row)
            on_row()
    content = {
        "schema": "knapformer.bench-planners/1",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "knapformer": __version__,
        "seeds": seeds,
        "rows": [row.to_dict() for row in rows],
    }
    if output is not None:
        write_json(output, content)
    typer.echo(json.dumps(content) if as_json else planner_table(rows))


def seeds_of(text: str) -> range:
    """The value of ``--seeds``."""
    first, dash, last = text.partition("-")
    if not (first.isdecimal() and (last.isdecimal() or not dash)):
        raise ConfigurationError(f"--seeds must be of the form 0-8, got {text!r}")
    if max(len(first), len(last)) > MOST_SEED_DIGITS or int(last or first) - int(first) >= MOST_SEEDS:
        raise ConfigurationError(
            f"--seeds must be at most {MOST_SEEDS} of {MOST_SEED_DIGITS} digits, got {text[:60]!r}"
        )
    seeds = range(int(first), int(last or first) + 1)
    if not seeds:
        raise ConfigurationError(f"--seeds must rise, got {text!r}")
    return seeds
