"""How near ``moldable`` comes to the lower bound, on workloads of images and videos, under caps of different width.

For each workload and cap, over seeds: predicted makespan over the lower bound (median and worst; judged by
tests/support/judge_plan.py, which shares no code with the planner, with --judge), tokens of the fullest rank over the
mean, and planning time from lengths to a checked plan (median over the seeds of the best of --repeats).
Prints one line per workload and cap, or JSON.

    python benchmarks/moldable_table.py --seeds 0-8
    python benchmarks/moldable_table.py --seeds 40-48 --caps none --only wan:16:350000 --json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

from knapformer import CostModel, Plan, __version__, evaluate, make_plan
from knapformer.workloads.workloads import workload

JUDGE = Path(__file__).parents[1] / "tests" / "support" / "judge_plan.py"
FLUX, WAN = CostModel(), CostModel(hidden=1536, num_heads=12)
SHARES = (".35", ".5", ".6")


@dataclass(frozen=True)
class Row:
    """A workload (``wan`` without its share, which cycles with the seed) and what is asked of it."""

    workload: str
    cost: CostModel
    median: float
    worst: float
    plan_ms: float

    def lengths(self, position: int, seed: int) -> list[list[int]]:
        name = self.workload
        if name.startswith("wan:"):
            _, ranks, tokens, *seconds = name.split(":")
            name = ":".join(["wan", ranks, tokens, SHARES[position % len(SHARES)], *seconds])
        return workload(name, seed=seed)


ROWS = (
    Row("lowres", FLUX, 1.0005, 1.0005, 2),
    Row("mixres", FLUX, 1.040, 1.045, 8),
    Row("joint", FLUX, 1.040, 1.045, 8),
    Row("wan:16:350000", FLUX, 1.012, 1.04, 10),
    Row("wan:16:350000", WAN, 1.012, 1.03, 10),
    Row("wan:32:175000:15", WAN, 1.04, 1.10, 20),
    Row("wan:8:125000", WAN, 1.015, 1.04, 5),
    Row("lognormal:32:8", FLUX, 1.015, 1.02, 8),
    Row("lognormal:128:8", FLUX, 1.015, 1.03, 20),
    Row("lognormal:1024:8", FLUX, 1.025, 1.03, 80),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-8", help="first-last; the position in it picks the wan mixes' share")
    parser.add_argument("--caps", default="none,1.5,1.25", help="over the mean tokens of a rank")
    parser.add_argument("--only", default="", help="workloads, by comma")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--judge", action="store_true", help="score with the independent judge too, and compare")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    judge = load_judge() if arguments.judge else None
    results = []
    for row in ROWS:
        if arguments.only and row.workload not in arguments.only.split(","):
            continue
        for cap in arguments.caps.split(","):
            results.append(measure(row, cap, range(first, last + 1), arguments.repeats, judge))
            if not arguments.json:
                print(line(results[-1]), flush=True)
    if arguments.json:
        print(json.dumps({**header(arguments), "rows": results}, indent=1))


def load_judge() -> ModuleType:
    spec = importlib.util.spec_from_file_location("judge_plan", JUDGE)
    if spec is None or spec.loader is None:
        raise SystemExit(f"no judge at {JUDGE}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def header(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "moldable_table",
        "date": date.today().isoformat(),
        "settings": vars(arguments),
        "knapformer": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def measure(row: Row, cap: str, seeds: range, repeats: int, judge: ModuleType | None) -> dict[str, Any]:
    ratios, fullest, times, splits, tight = [], [], [], [], []
    for position, seed in enumerate(seeds):
        lengths = row.lengths(position, seed)
        plan, plan_ms = timed_plan(lengths, row.cost, cap, repeats)
        found = evaluate(plan, row.cost)
        if judge is not None:
            check(judge, plan, lengths, row.cost, found.over_lower_bound)
        ratios.append(found.over_lower_bound)
        tight.append(found.makespan_s / found.tight_bound_s)
        fullest.append(float(found.rank_tokens.max() / found.rank_tokens.mean()))
        splits.append(found.num_split)
        times.append(plan_ms)
    return {
        "workload": row.workload,
        "hidden": row.cost.hidden,
        "num_heads": row.cost.num_heads,
        "cap": cap,
        "seeds": [seeds.start, seeds.stop - 1],
        "over_lower_bound": {"median": statistics.median(ratios), "worst": max(ratios), "each": ratios},
        "over_tight_bound_median": statistics.median(tight),
        "fullest_rank_over_mean": max(fullest),
        "num_split_median": statistics.median(splits),
        "plan_ms_median": statistics.median(times),
        "asked": {"median": row.median, "worst": row.worst, "plan_ms": row.plan_ms},
    }


def timed_plan(lengths: list[list[int]], cost: CostModel, cap: str, repeats: int) -> tuple[Plan, float]:
    caps = None if cap == "none" else math.ceil(float(cap) * sum(map(sum, lengths)) / len(lengths))
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        plan = make_plan(lengths, cost=cost, max_tokens_per_rank=caps)
        best = min(best, time.perf_counter() - start)
    if caps is not None and plan.rank_tokens.max() > caps:
        raise SystemExit(f"a rank holds {plan.rank_tokens.max()} tokens under a cap of {caps}")
    return plan, best * 1e3


def check(judge: ModuleType, plan: Plan, lengths: list[list[int]], cost: CostModel, ratio: float) -> None:
    content = plan.to_dict()
    judge.check(content, lengths)
    judged = judge.score(content, *judge.from_cost(cost.to_dict()))["T_over_LB"]
    if abs(judged / ratio - 1) > 1e-9:
        raise SystemExit(f"the judge says {judged}, the evaluator {ratio}")


def line(result: dict[str, Any]) -> str:
    ratio, asked = result["over_lower_bound"], result["asked"]
    return (
        f"{result['workload']:17s} {result['num_heads']:2d} heads  cap {result['cap']:4s}  "
        f"T/LB {ratio['median']:.4f} ({ratio['worst']:.4f})  asked {asked['median']:.4f} ({asked['worst']:.4f})  "
        f"T/tight {result['over_tight_bound_median']:.4f}  tokens {result['fullest_rank_over_mean']:.2f}  "
        f"split {result['num_split_median']:.0f}  {result['plan_ms_median']:.2f} ms of {asked['plan_ms']}"
    )


if __name__ == "__main__":
    main()
