"""How long planning takes, from lists of lengths to a checked plan, and in a fresh process. Prints JSON.

python benchmarks/planning_time.py
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from typing import Any

from knapformer import CostModel, __version__, make_plan
from knapformer.workloads.workloads import workload

CASES = (
    ("joint", 32, "bags", "g1n16+g2n4+g8n1", 1.5),
    ("joint", 32, "bags", "g4n8", 1.5),
    ("joint", 1024, "bags", "g4n256", 30.0),
    ("joint", 1024, "bags", "g1n512+g2n128+g8n32", 30.0),
    ("joint", 32, "moldable", None, 8.0),
    ("joint", 1024, "moldable", None, None),
)
"""Workload, ranks, planner, topology and the milliseconds asked for."""

FRESH = "from knapformer.plans.planners import make_plan; make_plan([[5000, 300], [400] * 20])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    content = {
        "benchmark": "planning_time",
        "date": date.today().isoformat(),
        "knapformer": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "cases": [measure(*case, repeats) for case in CASES],
        "fresh_process_s": {"median": statistics.median(fresh_process_s() for _ in range(5)), "asked": 1.0},
    }
    print(json.dumps(content, indent=1))


def measure(
    name: str, ranks: int, planner: str, topology: str | None, asked_ms: float | None, repeats: int
) -> dict[str, Any]:
    lengths = workload(name, seed=0, num_ranks=ranks)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        make_plan(lengths, planner=planner, topology=topology, cost=CostModel())
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "workload": name,
        "num_ranks": ranks,
        "num_sequences": sum(map(len, lengths)),
        "planner": planner,
        "topology": topology,
        "plan_ms": {"median": statistics.median(times), "least": min(times), "asked": asked_ms},
    }


def fresh_process_s() -> float:
    """Start of the interpreter, import and first plan."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", FRESH], check=True)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
