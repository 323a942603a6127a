"""All planners on the same steps: makespan over the lower bound, traffic, splits, tokens and planning time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.plans.planners import DEFAULT_PLANNER, PLANNERS, Evaluation, evaluate, make_plan
from knapformer.plans.registry import compared_planners
from knapformer.workloads.workloads import workload

SHARES = (".35", ".5", ".6")
BOLD_COLUMN = "T/LB median"
WAN_SHARE = "{share}"
"""In a workload's name: the share of video tokens, which cycles with the seed."""

Planner = Callable[[Lengths, CostModel], Plan]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload and the model that it trains."""

    workload: str
    num_ranks: int | None = None
    cost: CostModel = field(default_factory=CostModel)

    def lengths(self, position: int, seed: int) -> Lengths:
        name = self.workload.replace(WAN_SHARE, SHARES[position % len(SHARES)])
        return Lengths.from_ranks(workload(name, seed=seed, num_ranks=self.num_ranks))


WAN = CostModel(hidden=1536, num_heads=12)
SCENARIOS = (
    Scenario("default-8"),
    Scenario(f"wan:8:125000:{WAN_SHARE}", cost=WAN),
    Scenario(f"wan:16:350000:{WAN_SHARE}"),
    Scenario(f"wan:16:350000:{WAN_SHARE}", cost=WAN),
    Scenario("lowres"),
    Scenario("mixres"),
    Scenario("joint"),
    Scenario(f"wan:32:175000:{WAN_SHARE}:15", cost=WAN),
    Scenario("lognormal:32:8"),
    Scenario("lognormal:128:8"),
    Scenario("joint", 256),
    Scenario("lognormal:1024:8"),
)
"""FACTS' workloads on 8 to 1024 ranks."""


@dataclass(frozen=True, slots=True)
class Row:
    """One planner on one scenario, over seeds.

    Attributes:
        over_lower_bound, worst_over_lower_bound: makespan over the lower bound, median and largest.
        over_tight_bound: the same over the tight bound, median.
        gbytes: exchanged by one layer's forward pass, median.
        num_split: sequences on more than one rank, median.
        tokens_over_mean: of the fullest rank, largest.
        plan_ms: lengths to plan, median.
    """

    workload: str
    num_ranks: int
    num_heads: int
    planner: str
    over_lower_bound: float
    worst_over_lower_bound: float
    over_tight_bound: float
    gbytes: float
    num_split: float
    tokens_over_mean: float
    plan_ms: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Trial:
    found: Evaluation
    plan_ms: float


def bench_planners(
    scenarios: Sequence[Scenario] = SCENARIOS, seeds: Sequence[int] = range(9), with_cp_sat: bool = False
) -> Iterator[Row]:
    """The rows of each scenario, one scenario after another.

    Args:
        scenarios: what to plan.
        seeds: steps of each; a ``wan`` mix's share cycles along them.
        with_cp_sat: also the CP-SAT reference, on the few ranks that it can do.
    """
    for scenario in scenarios:
        steps = [scenario.lengths(position, seed) for position, seed in enumerate(seeds)]
        num_ranks = steps[0].num_ranks
        trials = {}
        for name, planner in planners(num_ranks, with_cp_sat).items():
            try:
                trials[name] = [_trial(planner, step, scenario.cost) for step in steps]
            except CapacityError:
                continue
        trials |= _bags(trials)
        for name, own in trials.items():
            if not name.startswith("bags g"):
                yield _row(scenario, num_ranks, name, own)


def planners(num_ranks: int, with_cp_sat: bool) -> dict[str, Planner]:
    """What is compared: every registered planner, the references too, and ``bags`` with each uniform layout."""
    references = [p.name for p in PLANNERS.values() if p.is_reference and (p.package is None or with_cp_sat)]
    found: dict[str, Planner] = {}
    for spec in compared_planners(num_ranks, references):
        label = str(spec) if spec.topology is None else f"{spec.name} {spec.topology}"
        found[label] = _planner(spec.name, topology=spec.topology)
    found[f"{DEFAULT_PLANNER}, no cap"] = _planner(DEFAULT_PLANNER, max_tokens_per_rank=None)
    return found


def _planner(name: str, **options: Any) -> Planner:
    return lambda lengths, cost: make_plan(lengths, planner=name, cost=cost, **options)


def _trial(planner: Planner, lengths: Lengths, cost: CostModel) -> _Trial:
    start = time.perf_counter()
    plan = planner(lengths, cost)
    plan_ms = (time.perf_counter() - start) * 1e3
    return _Trial(evaluate(plan, cost), plan_ms)


def _bags(trials: dict[str, list[_Trial]]) -> dict[str, list[_Trial]]:
    """The best fixed layout (by the median over the steps), named, and the best one of each step."""
    layouts = {name: own for name, own in trials.items() if name.startswith("bags g")}
    best = min(layouts, key=lambda name: _median(t.found.over_lower_bound for t in layouts[name]))
    each = [min(step, key=lambda t: t.found.makespan_s) for step in zip(*layouts.values(), strict=True)]
    return {f"best fixed bags ({best.removeprefix('bags ')})": layouts[best], "best bags of each step": each}


def _row(scenario: Scenario, num_ranks: int, planner: str, trials: Sequence[_Trial]) -> Row:
    found = [trial.found for trial in trials]
    return Row(
        workload=scenario.workload.replace(WAN_SHARE, "/".join(SHARES)),
        num_ranks=num_ranks,
        num_heads=scenario.cost.num_heads,
        planner=planner,
        over_lower_bound=_median(e.over_lower_bound for e in found),
        worst_over_lower_bound=max(e.over_lower_bound for e in found),
        over_tight_bound=_median(e.makespan_s / e.tight_bound_s if e.tight_bound_s else 1.0 for e in found),
        gbytes=_median(e.bytes / 1e9 for e in found),
        num_split=_median(e.num_split for e in found),
        tokens_over_mean=max((float(e.rank_tokens.max() / e.rank_tokens.mean()) for e in found), default=math.nan),
        plan_ms=_median(t.plan_ms for t in trials),
    )


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("workload", lambda row: row.workload),
    ("ranks", lambda row: str(row.num_ranks)),
    ("heads", lambda row: str(row.num_heads)),
    ("planner", lambda row: row.planner),
    (BOLD_COLUMN, lambda row: f"{row.over_lower_bound:.4f}"),
    ("worst", lambda row: f"{row.worst_over_lower_bound:.4f}"),
    ("GB per layer", lambda row: f"{row.gbytes:.2f}"),
    ("splits", lambda row: f"{row.num_split:.0f}"),
    ("fullest rank", lambda row: f"{row.tokens_over_mean:.2f}"),
    ("plan ms", lambda row: f"{row.plan_ms:.2f}"),
)
"""Of ``planner_table``: title, and how a row is shown."""


def planner_table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, a planner a line, each workload's best makespan in bold."""
    rows = list(rows)
    best: dict[tuple[str, int, int], float] = {}
    for row in rows:
        best[_step_of(row)] = min(best.get(_step_of(row), math.inf), row.over_lower_bound)
    lines = ["| " + " | ".join(title for title, _ in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        bold = BOLD_COLUMN if row.over_lower_bound == best[_step_of(row)] else None
        cells = (f"**{show(row)}**" if title == bold else show(row) for title, show in COLUMNS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _step_of(row: Row) -> tuple[str, int, int]:
    return row.workload, row.num_ranks, row.num_heads
