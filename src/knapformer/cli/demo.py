"""``knapformer demo``: train with and without balancing on this machine, and show the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import companion, require_packages, write_text
from knapformer.cli.options import MOST_RANKS
from knapformer.cli.report import write_page

DEMO_FILE = Path("runs/demo.json")


def demo(
    ranks: Annotated[
        int | None, typer.Option(help="Processes; as many as cores (2 to 8), or all GPUs.", min=1, max=MOST_RANKS)
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Results file; the page goes beside it.")] = DEMO_FILE,
) -> None:
    """Train a small MMDiT on images and a video, with and without balancing, and show the difference."""
    from knapformer.demo.config import TrainConfig, default_planners
    from knapformer.demo.launch import default_num_ranks

    num_ranks = default_num_ranks() if ranks is None else ranks
    config = TrainConfig(planners=default_planners(num_ranks))
    compare(config, num_ranks, output)


def compare(config: Any, num_ranks: int, output: Path) -> None:
    """Run a ``TrainConfig``, print its table, and write its results file and page."""
    from knapformer.demo.launch import run_comparison
    from knapformer.demo.results import calibration_line, explanation, results_table

    require_packages("demo and bench", "demo", "skimage", "PIL", "plotly")
    page = companion(output, ".html")
    console = Console()
    result = run_comparison(config, num_ranks=num_ranks)
    if result is None:
        return
    write_text(output, json.dumps(result) + "\n")
    console.print(calibration_line(result), highlight=False)
    console.print(results_table(result["summary"]))
    console.print(explanation(result), style="dim", highlight=False)
    console.print(f"{output}, {write_page(result, page)}", style="dim")
