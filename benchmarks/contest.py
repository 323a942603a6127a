"""Whether a plan of ``moldable`` is beaten in the simulated step by another planner's plan.

The planner minimises a closed formula; ``simulate_step`` plays routing, latency, and whole sequences' attention beside
an exchange, which the formula leaves out. For each workload and seed: the simulated time of every planner's plan (all
uniform bags among them) over that of ``moldable``'s, of plans that keep ``moldable``'s default cap. Below 1,
``moldable`` is beaten. Prints one line per workload, or JSON.

    python benchmarks/contest.py --seeds 0-4
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

from moldable_table import header
from regret import STEPS, Lengths, workloads

from knapformer import CostModel, Plan, evaluate, make_plan
from knapformer.plans.registry import compared_planners
from knapformer.predict.timeline import simulate_step
from knapformer.workloads.workloads import workload

NUM_LAYERS, PASSES = 40, 4.0
LATENCY_S = 30e-6
REFERENCES = ("karmarkar-karp", "power-of-two")
MOST_BEATEN = 0.99
"""Of ``moldable``'s simulated time: a plan below it is what the benchmark looks for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-4", help="first-last")
    parser.add_argument("--only", default="", help="a part of the workloads' names")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    first, last = map(int, arguments.seeds.split("-"))
    seeds = range(first, last + 1)
    known = workloads(seeds)
    for name, ranks in (("joint", 256), ("default-8", 8)):
        known[f"{name} on {ranks}"] = [(CostModel(), workload(name, seed=seed, num_ranks=ranks)) for seed in seeds]
    known |= hard_steps()
    results = []
    for name, steps in known.items():
        if arguments.only in name:
            results.append(compare(name, steps))
            if not arguments.json:
                print(line(results[-1]), flush=True)
    if arguments.json:
        print(json.dumps({**header(arguments), "benchmark": "contest", "rows": results}, indent=1))


def hard_steps() -> dict[str, list[tuple[CostModel, Lengths]]]:
    """Those of ``docs/planning.md``, by name; their caps are left out."""
    content = json.loads(STEPS.read_text())
    found: dict[str, list[tuple[CostModel, Lengths]]] = {}
    for step in content["steps"]:
        found.setdefault(step["name"], []).append(
            (CostModel.from_dict(step["cost"]), content["lengths"][step["lengths"]])
        )
    return found


def compare(name: str, steps: list[tuple[CostModel, Lengths]]) -> dict[str, Any]:
    """Every step; ``best_other`` is the least simulated time of another planner's plan over that of ``moldable``'s."""
    found = [one_step(lengths, replace(cost, num_layers=NUM_LAYERS, pass_factor=PASSES)) for cost, lengths in steps]
    ratios = [step["best_other"] for step in found]
    return {"workload": name, "median": statistics.median(ratios), "least": min(ratios), "steps": found}


def one_step(lengths: Lengths, cost: CostModel) -> dict[str, Any]:
    own = make_plan(lengths, cost=cost)
    cap = max(own.max_tokens_per_rank)
    own_s = seconds(own, cost)
    others = {}
    for spec in compared_planners(len(lengths), REFERENCES):
        if spec.name != "moldable":
            plan = make_plan(lengths, planner=spec.name, topology=spec.topology, cost=cost)
            if plan.rank_tokens.max() <= cap:
                others[str(spec)] = seconds(plan, cost)
    best = min(others, key=lambda spec: others[spec]) if others else None
    return {
        "moldable_s": own_s,
        "formula_s": evaluate(own, cost).step_time_s,
        "best_planner": best,
        "best_other": others[best] / own_s if best else 1.0,
        "best_other_formula": None if best is None else formula(lengths, best, cost) / evaluate(own, cost).step_time_s,
    }


def formula(lengths: Lengths, spec: str, cost: CostModel) -> float:
    name, _, topology = spec.partition(":")
    return evaluate(make_plan(lengths, planner=name, topology=topology or None, cost=cost), cost).step_time_s


def seconds(plan: Plan, cost: CostModel) -> float:
    return simulate_step(plan, cost, exchange_latency_s=LATENCY_S).step_s


def line(result: dict[str, Any]) -> str:
    worst = min(result["steps"], key=lambda step: step["best_other"])
    return (
        f"{result['workload']:40s} best other plan {result['median']:.4f} (least {result['least']:.4f}, "
        f"{worst['best_planner']}) of moldable's simulated time{', BEATEN' * (result['least'] < MOST_BEATEN)}"
    )


if __name__ == "__main__":
    main()
