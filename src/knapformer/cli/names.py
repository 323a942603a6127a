"""``knapformer list``: the names that the other commands know."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def list_names() -> None:
    """Print the names that the other commands know."""
    from knapformer.given.shapes import MODEL_SHAPES
    from knapformer.plans.registry import planner_names
    from knapformer.predict.hardware import HARDWARE
    from knapformer.workloads.workloads import workload_names

    table = Table(box=None, show_header=False, pad_edge=False)
    for kind, names in (
        ("planners", [planner_names()]),
        ("models", MODEL_SHAPES),
        ("hardware", HARDWARE),
        ("workloads", [*workload_names(), "data codes, as in g2b4i256f1s0"]),
    ):
        table.add_row(f"[bold]{kind}", ", ".join(names))
    Console().print(table, highlight=False)
