"""How near ``moldable`` comes to the bounds on steps that are hard to plan (``benchmarks/steps/hard_steps.json``).

For each kind of step, over its seeds: makespan over the lower bound and over the tight bound, median and worst, before
(the plan of 2026-12-01) and now, and planning time (least of --repeats). Prints JSON.

    python benchmarks/hard_steps.py
    python benchmarks/hard_steps.py --only giant --judge --lines
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

from moldable_table import check, load_judge

from knapformer import CostModel, Evaluation, Plan, __version__, evaluate, make_plan

STEPS = Path(__file__).parent / "steps" / "hard_steps.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--effort", default="default", help="fast, default or thorough")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--judge", action="store_true", help="score with the independent judge too, and compare")
    parser.add_argument("--lines", action="store_true", help="one line per kind instead of JSON")
    arguments = parser.parse_args()
    judge = load_judge() if arguments.judge else None
    content = json.loads(STEPS.read_text())
    kinds: dict[str, list[dict[str, Any]]] = {}
    for step in content["steps"]:
        if arguments.only not in step["name"]:
            continue
        lengths, cost = content["lengths"][step["lengths"]], CostModel.from_dict(step["cost"])
        plan, plan_ms = timed_plan(lengths, cost, step["max_tokens_per_rank"], arguments)
        found = evaluate(plan, cost)
        if judge is not None:
            check(judge, plan, lengths, cost, found.over_lower_bound)
        kinds.setdefault(step["name"], []).append(measured(step, found, plan_ms))
    rows = [row(name, steps) for name, steps in kinds.items()]
    if arguments.lines:
        for result in rows:
            print(line(result))
    else:
        print(json.dumps({**header(arguments), "kinds": rows}, indent=1))


def timed_plan(
    lengths: list[list[int]], cost: CostModel, caps: list[int] | None, arguments: argparse.Namespace
) -> tuple[Plan, float]:
    times = []
    for _ in range(arguments.repeats):
        start = time.perf_counter()
        plan = make_plan(lengths, cost=cost, max_tokens_per_rank=caps, effort=arguments.effort)
        times.append(time.perf_counter() - start)
    return plan, min(times) * 1e3


def measured(step: dict[str, Any], found: Evaluation, plan_ms: float) -> dict[str, Any]:
    return {
        "seed": step["seed"],
        "before": step["before"],
        "best_known": step["best_known"],
        "now": found.over_lower_bound,
        "tight_bound": found.tight_bound_s / found.lower_bound_s,
        "plan_ms": plan_ms,
    }


def row(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
    def summary(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "worst": max(values)}

    return {
        "kind": name,
        "over_lower_bound": {when: summary([step[when] for step in steps]) for when in ("before", "now")},
        "over_tight_bound": {
            when: summary([step[when] / step["tight_bound"] for step in steps]) for when in ("before", "now")
        },
        "plan_ms": statistics.median(step["plan_ms"] for step in steps),
        "steps": steps,
    }


def header(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "hard_steps",
        "date": date.today().isoformat(),
        "settings": vars(arguments),
        "knapformer": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def line(result: dict[str, Any]) -> str:
    figures = [
        f"{bound[5:10]} {result[bound]['before']['median']:.4f} -> {result[bound]['now']['median']:.4f}"
        for bound in ("over_lower_bound", "over_tight_bound")
    ]
    return f"{result['kind'][:56]:56s} {'  '.join(figures)}  {result['plan_ms']:.1f} ms"


if __name__ == "__main__":
    main()
