"""Many steps of a workload through many planners on modelled hardware."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from knapformer.errors import CapacityError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.plans.planners import evaluate, make_plan
from knapformer.plans.problem import Caps
from knapformer.plans.registry import PlannerSpec
from knapformer.predict.fitting import fitting_row
from knapformer.predict.hardware import Hardware
from knapformer.predict.memory import MemoryModel
from knapformer.predict.subject import Subject
from knapformer.predict.timeline import Sharding, simulate_step
from knapformer.workloads.workloads import draw

SCHEMA = "knapformer.simulate/1"

Draw = Callable[[], Lengths]
OnStep = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Setting:
    """The modelled machine and model.

    Attributes:
        cost: of a layer, with links, layers and passes.
        memory: of a rank; None leaves memory out.
        sharding: FSDP2; None leaves it out.
        exchange_latency_s: of each exchange.
        memory_bytes: that a rank has; None for any amount.
    """

    cost: CostModel
    memory: MemoryModel | None = None
    sharding: Sharding | None = None
    exchange_latency_s: float = 0.0
    memory_bytes: float | None = None


def setting_of(cost: CostModel, hardware: Hardware | None, memory: MemoryModel | None, *, num_ranks: int) -> Setting:
    """A setting with FSDP2 over the memory model's shard size, where there is one that divides the ranks."""
    setting = Setting(cost, memory, _sharding(cost, memory, num_ranks))
    if hardware is None:
        return setting
    return replace(setting, exchange_latency_s=hardware.exchange_latency_s, memory_bytes=hardware.memory_bytes)


def setting_for(subject: Subject, memory: MemoryModel | None, *, num_ranks: int) -> Setting:
    """The same for a subject; of a cost file's hardware only the memory counts."""
    return Setting(
        subject.cost,
        memory,
        _sharding(subject.cost, memory, num_ranks),
        subject.exchange_latency_s,
        subject.device.memory_bytes,
    )


def _sharding(cost: CostModel, memory: MemoryModel | None, num_ranks: int) -> Sharding | None:
    if memory is None or memory.shard_size == 1 or num_ranks % memory.shard_size:
        return None
    return Sharding.of(cost, num_ranks, shard_size=memory.shard_size, layer_parameters=memory.layer_parameters)


def drawn_from(name: str, num_ranks: int | None, seed: int) -> Draw:
    """Steps of a workload, one after another; equal seeds give equal steps."""
    rng = random.Random(seed)
    return lambda: Lengths.from_ranks(draw(name, rng, num_ranks))


def simulate(
    steps: Sequence[Lengths],
    planners: Sequence[PlannerSpec],
    setting: Setting,
    *,
    max_tokens_per_rank: Caps = "auto",
    on_step: OnStep = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Every planner on the same steps.

    Args:
        steps: their lengths.
        planners: compared with ``home`` where it is among them, else with the first one.
        setting: machine and model.
        max_tokens_per_rank: cap for ``whole`` and ``moldable``; the others know none.
        on_step: called after each step of each planner.

    Returns:
        For each planner what ``_summarize`` and ``fitting_row`` say, and how often a plan's reason was which; or
        ``{"error": …}`` where a step does not fit its caps.
    """
    found: dict[str, list[_Played]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for spec in planners:
        rows[str(spec)] = {}
        try:
            found[str(spec)] = [_play(lengths, spec, setting, max_tokens_per_rank, on_step) for lengths in steps]
        except CapacityError as error:
            rows[str(spec)] = {"error": str(error)}
    reference = "home" if "home" in found else next(iter(found), "")
    for spec in planners:
        played = found.get(str(spec))
        if played is not None:
            rows[str(spec)] = {
                "reference": reference,
                "reasons": dict(Counter(p.plan.reason for p in played if p.plan.reason)),
                **_summarize([p.measured for p in played], [p.measured["step_s"] for p in found[reference]]),
                **fitting_row(
                    [p.plan for p in played], steps, spec, setting.cost, setting.memory, setting.memory_bytes
                ),
            }
    return rows


@dataclass(frozen=True, slots=True)
class _Played:
    """One step of one planner."""

    plan: Plan
    measured: Mapping[str, float]


def _play(lengths: Lengths, spec: PlannerSpec, setting: Setting, caps: Caps, on_step: OnStep) -> _Played:
    began = time.perf_counter()
    plan = make_plan(
        lengths,
        planner=spec.name,
        topology=spec.topology,
        cost=setting.cost,
        max_tokens_per_rank=caps if spec.keeps_caps else None,
    )
    plan_s = time.perf_counter() - began
    evaluation = evaluate(plan, setting.cost)
    timeline = simulate_step(
        plan, setting.cost, sharding=setting.sharding, exchange_latency_s=setting.exchange_latency_s
    )
    on_step()
    passes = setting.cost.num_layers * setting.cost.pass_factor * setting.cost.machine.communication_scale
    measured = {
        "step_s": timeline.step_s,
        "formula_s": evaluation.step_time_s,
        "lower_bound_s": evaluation.lower_bound_s * setting.cost.num_layers * setting.cost.pass_factor,
        "max_over_mean": timeline.max_over_mean,
        "exchanged_bytes": evaluation.bytes * passes,
        "moved_tokens": float(evaluation.moved_tokens),
        "num_split": float(evaluation.num_split),
        "peak_tokens": float(evaluation.rank_tokens.max(initial=0)),
        "peak_tokens_over_mean": float(evaluation.rank_tokens.max() / max(evaluation.rank_tokens.mean(), 1e-9)),
        "plan_s": plan_s,
    }
    return _Played(plan, measured)


def _summarize(steps: Sequence[Mapping[str, float]], home_s: Sequence[float]) -> dict[str, Any]:
    """Means over steps; ``speedup`` is of total time, ``speedup_low`` and ``_high`` its extremes over steps."""

    def mean(name: str) -> float:
        return statistics.fmean(step[name] for step in steps)

    ratios = [h / step["step_s"] if step["step_s"] else 1.0 for h, step in zip(home_s, steps, strict=True)]
    return {
        "step_s": mean("step_s"),
        "step_p95_s": float(np.percentile([step["step_s"] for step in steps], 95)),
        "speedup": sum(home_s) / max(sum(step["step_s"] for step in steps), 1e-12),
        "speedup_low": min(ratios),
        "speedup_high": max(ratios),
        "over_lower_bound": statistics.median(step["step_s"] / step["lower_bound_s"] for step in steps),
        "formula_s": mean("formula_s"),
        "timeline_over_formula": mean("step_s") / mean("formula_s"),
        "discrepancy": mean("max_over_mean") - 1.0,
        "exchanged_gigabytes": mean("exchanged_bytes") / 1e9,
        "moved_tokens": mean("moved_tokens"),
        "num_split": mean("num_split"),
        "peak_tokens": max(step["peak_tokens"] for step in steps),
        "peak_tokens_over_mean": mean("peak_tokens_over_mean"),
        "plan_ms": 1e3 * statistics.median(step["plan_s"] for step in steps),
        "plan_ms_worst": 1e3 * max(step["plan_s"] for step in steps),
    }


def fits(row: Mapping[str, Any]) -> bool:
    """Whether a row of ``simulate`` was placed and no rank's memory is exceeded, as far as is known."""
    return "step_s" in row and not row.get("steps_over_memory")


def best_bags(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The fixed layout of bags with the least total time."""
    found = {name: row["step_s"] for name, row in rows.items() if name.startswith("bags:") and "step_s" in row}
    return min(found, key=lambda name: found[name]) if found else None
