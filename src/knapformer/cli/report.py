"""``knapformer report``: the HTML page of a results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from knapformer.errors import ConfigurationError


def report(
    results: Annotated[Path, typer.Argument(help="A results file of demo or bench.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="HTML file; beside the results file by default.")
    ] = None,
) -> None:
    """Make the HTML page of a results file."""
    try:
        content = json.loads(results.read_text())
    except ValueError as error:
        raise ConfigurationError(f"{results} is not JSON: {error}") from None
    page = write_page(content, results.with_suffix(".html") if output is None else output)
    print(page)


def write_page(content: Any, file: Path) -> Path:
    """Write the page of a results file's content, and return its path."""
    from knapformer.report.page import render_page

    if not isinstance(content, dict):
        raise ConfigurationError(f"a results file is a JSON object, got {type(content).__name__}")
    file.write_text(render_page(content))
    return file
