"""Tables of ``simulate``'s results: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from knapformer.predict.fitting import fitting_lines, peak_text
from knapformer.predict.presets import ratio_lines
from knapformer.predict.simulate import fits

COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("step s", lambda r: f"{r['step_s']:.3f}"),
    ("p95 s", lambda r: f"{r['step_p95_s']:.3f}"),
    ("speed-up", lambda r: f"{r['speedup']:.2f}"),
    ("over bound", lambda r: f"{r['over_lower_bound']:.3f}"),
    ("timeline/formula", lambda r: f"{r['timeline_over_formula']:.3f}"),
    ("discrepancy", lambda r: f"{100 * r['discrepancy']:.1f} %"),
    ("exchanged GB", lambda r: f"{r['exchanged_gigabytes']:,.0f}"),
    ("split", lambda r: f"{r['num_split']:.1f}"),
    ("peak tokens", lambda r: f"{r['peak_tokens']:,.0f} ({r['peak_tokens_over_mean']:.2f} × mean)"),
    ("peak GB", peak_text),
    ("plan ms", lambda r: f"{r['plan_ms']:.1f}"),
)


NARROW_COLUMNS = ("step s", "speed-up", "over bound", "discrepancy", "peak GB", "plan ms")
WIDE = 140
"""Characters that all columns take."""


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return ["does not fit", *[""] * (len(COLUMNS) - 1)]
    return [show(row) for _, show in COLUMNS]


def planner_table(title: str, rows: Mapping[str, Mapping[str, Any]], width: int = WIDE) -> Table:
    """One comparison, a planner a row. A narrow one has the columns that matter most.

    The fastest that fits is bold and green, what does not fit is red.
    """
    shown = [at for at, (name, _) in enumerate(COLUMNS) if width >= WIDE or name in NARROW_COLUMNS]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("planner", no_wrap=True)
    for at in shown:
        table.add_column(COLUMNS[at][0], justify="right", no_wrap=True)
    times = {name: row["step_s"] for name, row in rows.items() if fits(row)}
    fastest = min(times, key=lambda name: times[name], default=None)
    for name, row in rows.items():
        cells = _cells(row)
        style = "bold green" if name == fastest else None if fits(row) else "red"
        table.add_row(name, *(cells[at] for at in shown), style=style)
    return table


def subject_line(result: Mapping[str, Any]) -> str:
    """Which model, whose choice it was, and what times and memory rest on."""
    whose = result["model_chosen"]
    if result["workload_model"] not in (None, result["model"]):
        whose += f"; the workload's own is {result['workload_model']}"
    known = any(row.get("peak_memory_gigabytes") is not None for row in result["planners"].values())
    memory = f"memory of {result['memory_of']}" if known else "memory not known"
    return f"{result['model'] or 'a model without a name'} ({whose}); {result['speeds']}; {memory}"


def reason_lines(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which plans won, of planners that compare several."""
    found = {name: row["reasons"] for name, row in rows.items() if row.get("reasons")}
    return [
        f"what won, {name}: " + ", ".join(f"{reason} {count} ×" for reason, count in sorted(reasons.items()))
        for name, reasons in found.items()
    ]


def markdown(title: str, command: str, results: Sequence[Mapping[str, Any]]) -> str:
    """A page with a table for each comparison, and how it was made."""
    lines = [f"# {title}", "", f"`{command}`", ""]
    for result in results:
        sharded = f", FSDP2 over {result['shard_size']}" if result["shard_size"] else ""
        lines += [
            f"## {result['label']}",
            "",
            f"{result['num_ranks']} ranks, {result['steps']} steps{sharded}. {subject_line(result)}.",
            "",
        ]
        lines += ["| planner | " + " | ".join(name for name, _ in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += ["| " + " | ".join([name, *_cells(row)]) + " |" for name, row in result["planners"].items()]
        lines += ["", *[f"- {line}" for line in ratio_lines(result["ratios"])]]
        lines += [f"- {line}" for line in fitting_lines(result["planners"])]
        lines += [f"- {line}" for line in reason_lines(result["planners"])]
        lines += [f"- published, {name}: {value}" for name, value in (result["published"] or {}).items()]
        lines.append("")
    return "\n".join(lines)
