"""``knapformer list``: the names that the other commands know."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def list_names() -> None:
    """Print the names that the other commands know."""
    from knapformer.given.shapes import MODEL_SHAPES
    from knapformer.plans.registry import planner_names
    from knapformer.predict.hardware import HARDWARE
    from knapformer.workloads.workloads import all_workloads

    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, names in (
        ("planners", planner_names()),
        ("models", ", ".join(MODEL_SHAPES)),
        ("hardware", ", ".join(HARDWARE)),
    ):
        table.add_row(f"[bold]{kind}", names)
    workloads = Table(box=None, show_header=False, pad_edge=False)
    workloads.add_column(no_wrap=True)
    for workload in all_workloads():
        workloads.add_row(escape(workload.pattern), workload.model or "any model", workload.summary)
    table.add_row("[bold]workloads", workloads)
    Console().print(table, highlight=False)
