"""What balancing would gain for a team's own lengths, model and machines, and how to set it up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.plans.planners import make_plan
from knapformer.plans.registry import PlannerSpec, compared_planners
from knapformer.predict.fitting import fitting_row
from knapformer.predict.memory import MemoryModel
from knapformer.predict.simulate import Setting, best_bags
from knapformer.predict.timeline import simulate_step
from knapformer.workloads.dataset import grouped_steps, random_steps
from knapformer.workloads.registry import check_drawn

IntArray = npt.NDArray[np.int64]

SCHEMA = "knapformer.advise/1"
FILLED = 0.6
"""Without a given budget a rank loads this share of what fits, because balancing may give it half as much again."""

SIMPLER_IS_FINE = 0.01
"""Whole sequences are advised where splitting gains no more than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Everything ``advise`` says; times are of the simulated timeline.

    Attributes:
        num_samples, mean_tokens, median_tokens, longest_tokens: of the data set.
        num_ranks, tokens_per_rank: of a step, as asked for.
        mean_loaded, most_loaded: tokens per rank of the drawn steps, on average and in the step with most: a sample
            longer than ``tokens_per_rank`` is loaded all the same.
        tokens_that_fit: on one rank.
        ways: per way of batching and balancing: tokens per second, its gain over home, and how gains spread over steps.
        planner: the advised one, as ``PlannerSpec`` reads it; None where every one breaks the memory in some step.
        bags: the best fixed layout that fits and gains something.
        longest_ranks: fewest ranks that hold the longest sample.
        longest_s: one training step of the longest sample alone on one rank, and over all ranks at best.
        steps: drawn.
    """

    num_samples: int
    mean_tokens: float
    median_tokens: float
    longest_tokens: int
    num_ranks: int
    tokens_per_rank: int
    mean_loaded: float
    most_loaded: float
    tokens_that_fit: int
    ways: Mapping[str, Mapping[str, Any]]
    planner: str | None
    bags: str | None
    longest_ranks: int
    longest_s: tuple[float, float]
    steps: int

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def advise(
    tokens: IntArray,
    setting: Setting,
    memory: MemoryModel,
    *,
    num_ranks: int,
    memory_bytes: float,
    tokens_per_rank: int | None = None,
    num_steps: int = 20,
    seed: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> Advice:
    """Draw steps from a data set and compare ways to train on them.

    Args:
        tokens: (S,) of each sample.
        setting: machine and model.
        memory: of a rank.
        num_ranks: that balance together.
        memory_bytes: of a rank.
        tokens_per_rank: that a rank loads; by default ``FILLED`` of what fits, or the longest sample's share.
        num_steps: to draw.
        seed: equal seeds give equal steps.
        on_step: called after each step of each of ``num_ways``.

    Raises:
        CapacityError: the parameters or the longest sample do not fit, and by how much.
        ConfigurationError: more sequences would be drawn than can be.
    """
    fits = memory.tokens_that_fit(memory_bytes)
    _check_longest(int(tokens.max()), fits, num_ranks)
    budget = max(1, int(FILLED * fits)) if tokens_per_rank is None else tokens_per_rank
    per_rank = max(1.0, budget / float(tokens.mean()))
    check_drawn(num_steps, num_ranks * per_rank, "fewer --ranks, --steps or --tokens-per-rank")
    shape: Any = {"num_ranks": num_ranks, "tokens_per_rank": budget, "num_steps": num_steps}
    drawn = random_steps(tokens, **shape, rng=np.random.default_rng(seed))
    grouped = grouped_steps(tokens, **shape, rng=np.random.default_rng(seed))

    def run(lengths: Lengths, spec: PlannerSpec) -> tuple[float, Plan]:
        found = _run(lengths, spec, setting, fits)
        on_step()
        return found

    def fit_of(plans: Sequence[Plan], steps: Sequence[Lengths], spec: PlannerSpec) -> dict[str, Any]:
        return fitting_row(plans, steps, spec, setting.cost, memory, memory_bytes)

    return _advice(tokens, drawn, _compare(drawn, grouped, run, fit_of), fits, budget, setting.cost)


def _check_longest(longest: int, fits: int, num_ranks: int) -> None:
    if longest > fits * num_ranks:
        raise CapacityError(
            f"the longest sample has {longest:,} tokens, {num_ranks} ranks hold {fits * num_ranks:,} at most: "
            f"{longest - fits * num_ranks:,} too many"
        )


def _advice(
    tokens: IntArray,
    drawn: Sequence[Lengths],
    ways: dict[str, dict[str, Any]],
    fits: int,
    budget: int,
    cost: CostModel,
) -> Advice:
    """What the ways to train on the drawn steps come to."""
    num_ranks, longest = drawn[0].num_ranks, int(tokens.max())
    loaded = [step.num_tokens / num_ranks for step in drawn]
    fitting = {name: way for name, way in ways.items() if _fits(way)}
    longest_s = float(cost.work_s([longest]).sum() * cost.num_layers * cost.pass_factor)
    return Advice(
        num_samples=len(tokens),
        mean_tokens=float(tokens.mean()),
        median_tokens=float(np.median(tokens)),
        longest_tokens=longest,
        num_ranks=num_ranks,
        tokens_per_rank=budget,
        mean_loaded=statistics.fmean(loaded),
        most_loaded=max(loaded),
        tokens_that_fit=fits,
        ways=ways,
        planner=_advised(fitting),
        bags=best_bags({name: {"step_s": -way["gain"]} for name, way in fitting.items() if way["gain"] > 1}),
        longest_ranks=max(1, math.ceil(longest / fits)),
        longest_s=(longest_s, longest_s / num_ranks),
        steps=len(drawn),
    )


def _compare(
    drawn: Sequence[Lengths],
    grouped: Sequence[Lengths],
    run: Callable[[Lengths, PlannerSpec], tuple[float, Plan]],
    fit_of: Callable[[Sequence[Plan], Sequence[Lengths], PlannerSpec], dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """Each way by its name; gains are over home, which comes first and always runs."""
    ways: dict[str, dict[str, Any]] = {}
    home: list[float] | None = None
    for name, spec in _ways(drawn[0].num_ranks).items():
        steps = grouped if name == "length-grouped" else drawn
        try:
            runs = [run(lengths, spec) for lengths in steps]
        except CapacityError as error:
            ways[name] = {"error": str(error)}
            continue
        rates = [rate for rate, _ in runs]
        home = rates if home is None else home
        base = _total(drawn, home)
        ways[name] = {
            **_way(_total(steps, rates) / base, base, rates, home),
            **fit_of([plan for _, plan in runs], steps, spec),
        }
    return ways


def num_ways(num_ranks: int) -> int:
    """Ways that ``advise`` compares."""
    return len(_ways(num_ranks))


def _ways(num_ranks: int) -> dict[str, PlannerSpec]:
    """All planners but those that no one would train with: everything split, and bags of one rank."""
    home = PlannerSpec("home")
    specs = [s for s in compared_planners(num_ranks) if s.name != "ulysses" and s.topology != f"g1n{num_ranks}"]
    ways = {str(spec): spec for spec in specs}
    return {"home": home, "length-grouped": home, **ways}


def _run(lengths: Lengths, spec: PlannerSpec, setting: Setting, cap: int) -> tuple[float, Plan]:
    """Tokens per second of a step, and its plan."""
    plan = make_plan(
        lengths,
        planner=spec.name,
        topology=spec.topology,
        cost=setting.cost,
        max_tokens_per_rank=cap if spec.keeps_caps else None,
    )
    timeline = simulate_step(
        plan, setting.cost, sharding=setting.sharding, exchange_latency_s=setting.exchange_latency_s
    )
    return lengths.num_tokens / timeline.step_s, plan


def _total(steps: Sequence[Lengths], rates: Sequence[float]) -> float:
    """Tokens per second over all steps."""
    return sum(s.num_tokens for s in steps) / sum(s.num_tokens / r for s, r in zip(steps, rates, strict=True))


def _way(gain: float, home_rate: float, rates: Sequence[float], home: Sequence[float]) -> dict[str, Any]:
    """The gain of all steps together; its error is two standard errors of the steps' own gains."""
    gains = [rate / base for rate, base in zip(rates, home, strict=True)]
    spread = statistics.stdev(gains) if len(gains) > 1 else math.inf
    return {
        "tokens_per_s": gain * home_rate,
        "gain": gain,
        "gain_error": 2 * spread / math.sqrt(len(gains)),
        "gain_low": min(gains),
        "gain_high": max(gains),
    }


def _fits(way: Mapping[str, Any]) -> bool:
    """Whether no rank exceeds its memory in any step."""
    return "gain" in way and not way["steps_over_memory"]


def _advised(ways: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Of ways that fit, the fastest planner; a simpler one where they are alike."""
    gains = {name: way["gain"] for name, way in ways.items() if name != "length-grouped"}
    if not gains:
        return None
    best = max(gains, key=lambda name: gains[name])
    return next((s for s in ("home", "whole") if gains.get(s, 0.0) >= gains[best] * (1 - SIMPLER_IS_FINE)), best)
