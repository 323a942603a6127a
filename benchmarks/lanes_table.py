"""How near plans of one lane and of two come to the lower bound, as the cost model predicts it.

Over seeds: predicted makespan over the lower bound (median and worst) of ``moldable`` in one lane, and in two where an
exchange takes none or a tenth of a rank's speed while it runs; and planning time. Every plan is scored by
tests/support/judge_plan.py too, which shares no code with the planner, and must agree to 1e-9.

    python benchmarks/lanes_table.py --seeds 0-8 > benchmarks/DATE-lanes-table.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from moldable_table import ROWS, load_judge

from knapformer import CostModel, __version__, evaluate, make_plan

KINDS = {"one lane": (1, 0.0), "two lanes": (2, 0.0), "two lanes, interference 0.1": (2, 0.1)}
HUNYUAN = CostModel(gamma=0.76, flops_per_s=415e12)


def equal_lengths(count: int, length: int, num_ranks: int) -> list[list[int]]:
    return [[length] * len(range(rank, count, num_ranks)) for rank in range(num_ranks)]


def giants(count: int, length: int, num_ranks: int, seed: int) -> list[list[int]]:
    """A few long sequences, and images of some thousand tokens on every rank."""
    return [
        [2000 + 137 * ((seed + rank + i) % 17) for i in range(8)] + [length] * (rank < count)
        for rank in range(num_ranks)
    ]


def steps(first: int, last: int) -> dict[str, list[tuple[CostModel, list[list[int]]]]]:
    """By name, the steps of each kind."""
    seeds = range(first, last + 1)
    found = {
        f"{row.workload} ({row.cost.num_heads} heads)": [
            (row.cost, row.lengths(i, seed)) for i, seed in enumerate(seeds)
        ]
        for row in ROWS
    }
    found["100 × 4096 on 64 ranks"] = [(CostModel(), equal_lengths(100, 4096, 64))]
    found["7 × 4096 on 8 ranks"] = [(CostModel(), equal_lengths(7, 4096, 8))]
    found["three of 119,000 and images on 64 ranks"] = [(HUNYUAN, giants(3, 119_000, 64, seed)) for seed in seeds]
    found["two of 250,000 and images on 32 ranks"] = [(HUNYUAN, giants(2, 250_000, 32, seed)) for seed in seeds]
    return found


def score(
    cost: CostModel, lengths: list[list[int]], lanes: int, interference: float, judge: Any
) -> tuple[float, float]:
    """Makespan over the lower bound, and milliseconds of planning (best of three)."""
    cost = cost.with_machine(interference=interference)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        plan = make_plan(lengths, cost=cost, lanes=lanes)
        times.append(1e3 * (time.perf_counter() - began))
    found = evaluate(plan, cost)
    content = plan.to_dict()
    judge.check(content, lengths)
    judged = judge.score(content, *judge.from_cost(cost.to_dict()))
    if abs(judged["makespan_s"] / found.makespan_s - 1) > 1e-9:
        sys.exit(f"the judge has {judged['makespan_s']} s, the evaluator {found.makespan_s} s")
    return found.over_lower_bound, min(times)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-8", help="first-last")
    options = parser.parse_args(arguments)
    judge, rows = load_judge(), []
    for name, own in steps(*map(int, options.seeds.split("-"))).items():
        row: dict[str, Any] = {"workload": name, "steps": len(own)}
        for kind, (lanes, interference) in KINDS.items():
            scores, times = zip(*(score(*step, lanes, interference, judge) for step in own), strict=True)
            row[kind] = {"median": statistics.median(scores), "worst": max(scores), "plan_ms": statistics.median(times)}
        rows.append(row)
        print(name, *(f"{row[kind]['median']:.4f}" for kind in KINDS), file=sys.stderr, flush=True)
    where = {"machine": platform.platform(), "date": str(date.today()), "knapformer": __version__}
    command = f"python benchmarks/{Path(__file__).name} --seeds {options.seeds}"
    print(json.dumps({"schema": "knapformer.lanes-table/1", "command": command, **where, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
