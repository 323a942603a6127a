"""Which losses give the same gradients from plan to plan and on one process: JSON, and the table of docs/losses.md.

python scripts/losses.py            # prints the JSON
python scripts/losses.py --write    # and writes the table, and benchmarks/DATE-losses.json
"""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/losses.md"
sys.path.insert(0, str(ROOT / "tests/support"))
BEGIN, END = "<!-- made by scripts/losses.py -->\n", "<!-- end of the table -->\n"
SAME = 1e-10
NAMES = {"at home": "at home, after `restore`", "packed": "on the packed rows of a step"}
COLUMNS = (
    "the rank's loss",
    "computed",
    "the same from plan to plan?",
    "equal to one process with all data?",
    "a rank without samples logs",
)


def measured(plans: Iterable[str] | None = None) -> list[dict[str, Any]]:
    import loss_cases
    from launch import run_ranks

    chosen = list(plans or loss_cases.PLANS)
    ranks = run_ranks(loss_cases.table_job, loss_cases.NUM_RANKS, chosen)
    return list(loss_cases.cells(ranks, chosen))


def table(cells: Iterable[dict[str, Any]]) -> str:
    head = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
    return head + "".join(row(cell) for cell in cells)


def row(cell: dict[str, Any], *, figures: bool = True) -> str:
    """One line; without figures only yes or no, which do not depend on the plans that were tried."""
    plans, process = cell["plan_to_plan"], cell["one_process"]
    same_plans = "yes" if plans < SAME else f"**no**: {plans:.2f}" if figures else "**no**"
    if process < SAME:
        same_process = "yes"
    elif cell["multiple"]:
        same_process = f"**no**: {cell['multiple']:.3f} of it"
    else:
        same_process = f"**no**: {process:.2f}" if figures else "**no**"
    logged = "NaN" if math.isnan(cell["without_samples"]) else f"{cell['without_samples']:.0f}"
    return f"| `{cell['reduction']}` | {NAMES[cell['place']]} | {same_plans} | {same_process} | {logged} |\n"


def main() -> None:
    found = {
        "schema": "knapformer.losses/1",
        "command": "python scripts/losses.py --write",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, gloo",
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "cells": measured(),
    }
    print(json.dumps(found, indent=1))
    if "--write" in sys.argv[1:]:
        text = PAGE.read_text()
        before, after = text[: text.index(BEGIN)], text[text.index(END) :]
        PAGE.write_text(before + BEGIN + "\n" + table(found["cells"]) + "\n" + after)
        (ROOT / f"benchmarks/{found['date']}-losses.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
