"""Run every rank's share of a plan with real kernels on one device, one rank after another.

This tests what all planning rests on: that a rank's time follows from the lengths it is given. What would come from
other ranks is stood in for by equal numbers. Communication, packing and unpacking included, is therefore not measured;
where a makespan needs it, it is the cost model's.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.autograd import Function

from knapformer.errors import ConfigurationError
from knapformer.execution.attend import BalancedAttention
from knapformer.execution.transport import Channel
from knapformer.execution.turns import Turns
from knapformer.given.cost import CostModel
from knapformer.measure.runner import ModelRunner, Stopwatch
from knapformer.plans.plan import Plan
from knapformer.plans.planners import evaluate
from knapformer.schedules.attention import attention_schedule
from knapformer.schedules.tokens import RankTokens

SCHEMA = "knapformer.replay/1"


class ReplayAttention(BalancedAttention):
    """A rank's attention with other ranks' rows, and what the rank would get back for its own, stood in for."""

    def turns(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False
    ) -> Turns[Tensor]:
        if self.schedule.is_local:
            return self._whole((q, k, v), scale, causal)
        width = q.shape[-1]
        queries, keys = self.schedule.queries, self.schedule.keys
        own, shared = self._apart(q, k, v)
        whole = self._whole(own, scale, causal)
        tiles = tuple(
            _StandIn.apply(x.reshape(-1, width), way.num_out)
            for x, way in zip(shared, (queries, keys, keys), strict=True)
        )
        split = _StandIn.apply(self._tiles(tiles, scale, causal), queries.num_in)
        return torch.cat([whole, split.view(-1, self.num_heads, width)])
        yield  # a generator that never waits


class _StandIn(Function):
    """(units, width) to another number of units, both ways: as many equal numbers, which cost almost nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_out: int) -> Tensor:
        ctx.num_in = x.shape[0]
        return _filled(x, num_out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _filled(gradient, ctx.num_in), None


def _filled(x: Tensor, count: int) -> Tensor:
    return x.new_full((count, x.shape[1]), 0.5)


def rank_share(plan: Plan, rank: int, runner: ModelRunner) -> Callable[[], None]:
    """Forward and backward over what ``plan`` gives ``rank``, in one lane: nothing travels that another could hide."""
    plan = replace(plan, lane=plan.lane[:0])
    tokens = RankTokens.of(plan, rank)
    heads = runner.config.num_heads
    attention = ReplayAttention(
        attention_schedule(plan, tokens, rank, heads, heads),
        Channel(None, rank),
        runner.device,
        num_heads=heads,
        num_kv_heads=heads,
    )
    lengths = tokens.sequence_tokens.tolist()
    return lambda: runner.train(lengths, attention)


def replay(
    plans: Mapping[str, Plan],
    cost: CostModel,
    runner: ModelRunner,
    *,
    t0_s: float = 0.0,
    reference_s: float | None = None,
    repeats: int = 3,
    on_rank: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Time every rank of every plan, interleaved, and compare with the prediction.

    Args:
        plans: of the same ranks, by name; cut over other heads, they get the model's in proportion.
        cost: the prediction, of a layer of ``runner``'s stand-in.
        runner: what runs.
        t0_s: constant of the fit, part of every rank's prediction.
        reference_s: of the stopwatch, when the cost was measured.
        repeats: medians are over so many.
        on_rank: called after each measurement.

    Returns:
        For each plan what ``_summary`` says.

    Raises:
        ConfigurationError: the plans are for different numbers of ranks.
    """
    worlds = {plan.world_size for plan in plans.values()}
    if len(worlds) != 1:
        raise ConfigurationError(f"replayed plans must have the same ranks, got {sorted(worlds)}")
    heads = runner.config.num_heads
    plans = {name: plan.with_heads(heads, heads) for name, plan in plans.items()}
    (num_ranks,) = worlds
    shares = {name: [rank_share(plan, rank, runner) for rank in range(num_ranks)] for name, plan in plans.items()}
    times: dict[str, list[list[float]]] = {name: [[] for _ in range(num_ranks)] for name in plans}
    next(iter(shares.values()))[0]()
    watch = Stopwatch(runner, reference_s)
    for _ in range(repeats):
        for rank in range(num_ranks):
            for name, runs in shares.items():
                times[name][rank].append(watch.units(runs[rank]))
                on_rank()
    return {name: _summary(plans[name], cost, t0_s, times[name], watch) for name in plans}


def _summary(
    plan: Plan, cost: CostModel, t0_s: float, times: Sequence[Sequence[float]], watch: Stopwatch
) -> dict[str, Any]:
    """Measured and predicted seconds of each rank's computing, and what follows from them."""
    evaluation = evaluate(plan, cost)
    passes = cost.num_layers * cost.pass_factor
    measured = [watch.seconds(rank) for rank in times]
    predicted = [t0_s + passes * busy for busy in evaluation.rank_busy_s.tolist()]
    errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
    predicted_mean = statistics.fmean(predicted)
    return {
        "planner": plan.planner,
        "num_split": evaluation.num_split,
        "rank_tokens": evaluation.rank_tokens.tolist(),
        "measured_s": measured,
        "predicted_s": predicted,
        "mape": statistics.fmean(map(abs, errors)),
        "worst_error": max(errors, key=abs),
        "measured_discrepancy": max(measured) / statistics.fmean(measured) - 1,
        "predicted_discrepancy": max(predicted) / predicted_mean - 1,
        "measured_busiest_s": max(measured),
        "predicted_busiest_s": max(predicted),
        "predicted_step_s": t0_s + evaluation.step_time_s,
        "repeat_spread": statistics.fmean((max(t) - min(t)) / statistics.median(t) for t in times),
    }


def replay_table(results: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each plan: seconds of the busiest rank, the ranks' discrepancy, both as predicted, and the errors."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("plan", no_wrap=True)
    columns = ("busiest\ns", "pred.\ns", "spread", "pred.\nspread", "MAPE", "worst", "split", "speed\n-up ×")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    first = next(iter(results.values()))["measured_busiest_s"]
    for name, row in results.items():
        table.add_row(
            name,
            f"{row['measured_busiest_s']:.3f}",
            f"{row['predicted_busiest_s']:.3f}",
            f"{100 * row['measured_discrepancy']:.1f} %",
            f"{100 * row['predicted_discrepancy']:.1f} %",
            f"{100 * row['mape']:.1f} %",
            f"{100 * row['worst_error']:+.1f} %",
            f"{row['num_split']}",
            f"{first / row['measured_busiest_s']:.2f}",
        )
    return table
