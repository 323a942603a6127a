"""What a plan costs where the machine is not as the cost model says.

Steps are planned with the cost model as stated, then priced in *worlds* that differ from it: links slower or faster,
compute slower or faster, ranks of unequal speed. The regret in a world is the makespan there over that of the best plan
for it: the lowest of ``moldable`` told the truth, and of every plan looked at. Shown for ``moldable`` with several
``link_margin``, and for the best bags: the uniform layout with the lowest median makespan of the workload in that
world, which nobody can know beforehand.
With --judge every plan is priced by tests/support/judge_plan.py too, and must agree to 1e-9. Prints JSON.

    python benchmarks/regret.py --seeds 0-9 > benchmarks/DATE-regret.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lanes_table import HUNYUAN, giants
from moldable_table import ROWS, check, header, load_judge

from knapformer import CostModel, Plan, evaluate, make_plan
from knapformer.given.topology import uniform_topologies
from knapformer.plans.registry import MOST_BAG_RANKS

STEPS = Path(__file__).parent / "steps" / "hard_steps.json"
MARGINS = (1.0, 2.0, 3.0, 4.0)
Lengths = list[list[int]]
World = Callable[[CostModel, int, int], CostModel]
"""The true cost model, from the stated one, the number of ranks and the seed."""


def links(near: float, far: float) -> World:
    """Links inside and between nodes so many times slower."""

    def slower(cost: CostModel, num_ranks: int, seed: int) -> CostModel:
        machine = cost.machine
        return cost.with_machine(
            intra_node_bytes_per_s=machine.intra_node_bytes_per_s / near,
            inter_node_bytes_per_s=machine.inter_node_bytes_per_s / far,
            latency_s=machine.latency_s * far,
        )

    return slower


def noisy(cost: CostModel, num_ranks: int, seed: int) -> CostModel:
    rng = random.Random(f"noise {seed}")
    return cost.with_machine(speeds=tuple(max(0.5, rng.gauss(1.0, 0.05)) for _ in range(num_ranks)))


def one_slow(cost: CostModel, num_ranks: int, seed: int) -> CostModel:
    slow = random.Random(f"slow {seed}").randrange(num_ranks)
    return cost.with_machine(speeds=tuple(0.9 if rank == slow else 1.0 for rank in range(num_ranks)))


WORLDS: dict[str, World] = {
    "as stated": links(1, 1),
    "links between nodes 3 × slower": links(1, 3),
    "all links 3 × slower": links(3, 3),
    "all links 3 × faster": links(1 / 3, 1 / 3),
    "compute 20 % faster": lambda cost, n, seed: replace(cost, flops_per_s=1.2 * cost.flops_per_s),
    "compute 20 % slower": lambda cost, n, seed: replace(cost, flops_per_s=0.8 * cost.flops_per_s),
    "attention 20 % faster": lambda cost, n, seed: replace(cost, gamma=0.8 * cost.gamma),
    "attention 20 % slower": lambda cost, n, seed: replace(cost, gamma=1.2 * cost.gamma),
    "5 % noise per rank": noisy,
    "one rank 10 % slow": one_slow,
}


def hunyuan(seed: int) -> tuple[CostModel, Lengths]:
    """40,000 tokens a rank, drawn from the sequences of both such steps of hard_steps.json."""
    content = json.loads(STEPS.read_text())
    known = [step for step in content["steps"] if step["name"].startswith("hunyuan-64 (24h")]
    pool = [length for step in known for rank in content["lengths"][step["lengths"]] for length in rank]
    rng, rows, total = random.Random(seed), [[] for _ in range(64)], 0  # type: tuple[random.Random, Lengths, int]
    for i in range(sys.maxsize):
        if total >= 64 * 40_000:
            break
        rows[i % 64].append(rng.choice(pool))
        total += rows[i % 64][-1]
    return CostModel.from_dict(known[0]["cost"]), rows


def workloads(seeds: range) -> dict[str, list[tuple[CostModel, Lengths]]]:
    found = {"HunyuanVideo, 64 ranks": [hunyuan(seed) for seed in seeds]}
    found["three of 119,000 and images, 64 ranks"] = [(HUNYUAN, giants(3, 119_000, 64, seed)) for seed in seeds]
    found["two of 250,000 and images, 32 ranks"] = [(HUNYUAN, giants(2, 250_000, 32, seed)) for seed in seeds]
    for row in ROWS:
        own = [(row.cost, row.lengths(i, seed)) for i, seed in enumerate(seeds)]
        found[f"{row.workload}, {row.cost.num_heads} heads"] = own
    return found


def plans_of(lengths: Lengths, cost: CostModel) -> dict[str, Plan]:
    """Planned as stated: ``moldable`` with each margin, and uniform bags."""
    plans = {
        f"moldable, margin {margin:g}": make_plan(
            lengths, cost=cost.with_machine(link_margin=margin), max_tokens_per_rank=None
        )
        for margin in MARGINS
    }
    for topology in uniform_topologies(len(lengths)):
        if topology.bag_sizes[0] <= MOST_BAG_RANKS:
            plans[str(topology)] = make_plan(lengths, planner="bags", topology=topology, cost=cost)
    return plans


def price(steps: list[tuple[CostModel, Lengths]], seeds: range, judge: Any) -> dict[str, dict[str, list[float]]]:
    """World, plan and seed to the makespan over the lower bound; "truth" is ``moldable`` told the truth."""
    found: dict[str, dict[str, list[float]]] = {world: {} for world in WORLDS}
    for (cost, lengths), seed in zip(steps, seeds, strict=True):
        plans = plans_of(lengths, cost)
        for world, true_cost in WORLDS.items():
            true = true_cost(cost, len(lengths), seed)
            told = make_plan(lengths, cost=true.with_machine(link_margin=1.0), max_tokens_per_rank=None)
            for name, plan in {**plans, "truth": told}.items():
                ratio = evaluate(plan, true).over_lower_bound
                found[world].setdefault(name, []).append(ratio)
                if judge is not None and (name.startswith("moldable") or name == "truth"):
                    check(judge, plan, lengths, true, ratio)
    return found


def row(workload: str, world: str, ratios: dict[str, list[float]]) -> dict[str, Any]:
    bags = {name: values for name, values in ratios.items() if name.startswith("g")}
    best_layout = min(bags, key=lambda name: statistics.median(bags[name]))
    best = [min(values) for values in zip(*ratios.values(), strict=True)]
    each_best_bags = [min(values) for values in zip(*bags.values(), strict=True)]

    def summary(values: list[float]) -> dict[str, float]:
        regrets = [value / least for value, least in zip(values, best, strict=True)]
        return {"median": statistics.median(regrets), "worst": max(regrets)}

    own = {name: values for name, values in ratios.items() if name.startswith("moldable")}
    return {
        "workload": workload,
        "world": world,
        "best_bags": best_layout,
        "over_lower_bound_median": {
            name: statistics.median(values) for name, values in {**own, "best bags": bags[best_layout]}.items()
        },
        "regret": {name: summary(values) for name, values in {**own, "best bags": bags[best_layout]}.items()},
        "over_best_bags_of_each_step": {
            name: max(value / least for value, least in zip(values, each_best_bags, strict=True))
            for name, values in own.items()
        },
    }


def table(path: str) -> str:
    """Markdown of a file that this script wrote: regret, median (worst) over seeds."""
    rows = json.loads(Path(path).read_text())["rows"]
    who = [f"moldable, margin {margin:g}" for margin in MARGINS] + ["best bags"]
    lines = ["| workload | world | " + " | ".join(who) + " |", "|---" * (len(who) + 2) + "|"]
    for found in rows:
        cells = [f"{found['regret'][name]['median']:.3f} ({found['regret'][name]['worst']:.3f})" for name in who]
        lines.append(f"| {found['workload']} | {found['world']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-9", help="first-last")
    parser.add_argument("--only", default="", help="workloads whose name contains this")
    parser.add_argument("--judge", action="store_true", help="price with the independent judge too, and compare")
    parser.add_argument("--table", metavar="FILE", help="print a results file as a table, and measure nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(options.table))
        return
    first, last = map(int, options.seeds.split("-"))
    seeds, judge, rows = range(first, last + 1), load_judge() if options.judge else None, []
    for name, steps in workloads(seeds).items():
        if options.only not in name:
            continue
        for world, ratios in price(steps, seeds, judge).items():
            rows.append(row(name, world, ratios))
            medians = {who: round(regret["median"], 4) for who, regret in rows[-1]["regret"].items()}
            print(name, world, medians, rows[-1]["over_best_bags_of_each_step"], file=sys.stderr, flush=True)
    print(json.dumps({**header(options), "benchmark": "regret", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
