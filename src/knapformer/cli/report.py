"""``knapformer report``: the HTML page of a results file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from knapformer.cli.common import companion, require_packages, write_text


def report(
    results: Annotated[Path, typer.Argument(help="A results file of demo or bench.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file; beside the results file by default.")
    ] = None,
) -> None:
    """Make the HTML page of a results file."""
    from knapformer.demo.results_file import read_results

    require_packages("report", "demo", "plotly")

    file = companion(results, ".html") if output is None else output
    print(write_page(read_results(results), file))


def write_page(content: Any, file: Path) -> Path:
    """Write the page of a results file's content, and return its path."""
    from knapformer.report.page import render_page

    write_text(file, render_page(content))
    return file
