"""What a training comparison says, from its raw measurements: pure functions of the results file's content."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

SCHEMA = "knapformer.bench/1"

Series = Sequence[float | None]


def step_times(notes: Mapping[str, Any]) -> list[float | None]:
    """Seconds of each step: of the rank that took longest; None where they do not count."""
    return [None if None in ranks else max(ranks) for ranks in zip(*notes["step_s"], strict=True)]


def loss_curve(notes: Mapping[str, Any]) -> list[float]:
    """The objective at each step: ranks' losses are made so that their mean is it."""
    return [statistics.fmean(ranks) for ranks in zip(*notes["loss"], strict=True)]


def max_over_mean(ranks: Sequence[float]) -> float:
    """1 for ranks that do nothing."""
    mean = statistics.fmean(ranks)
    return max(ranks) / mean if mean else 1.0


def median(values: Series) -> float:
    """Of the values that are there."""
    return statistics.median(value for value in values if value is not None)


def summarize(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """One row per planner; the first planner is the reference of speed-ups and losses.

    Returns:
        For each planner: ``step_s`` (median step), ``tokens_per_s``, ``samples_per_s``, ``predicted_discrepancy`` and
        ``measured_discrepancy`` (medians over steps of max/mean − 1 over the ranks' busy time), ``exchange_s`` (mean
        over ranks of the wall time in exchanges, waiting included, median over steps), ``megabytes`` (sent in a step by
        all ranks, mean), ``prepare_ms``, ``predicted_step_s``, ``speedup`` (reference's median step over this one's),
        ``ideal_speedup`` (the reference's measured max/mean busy time, median over steps), ``of_ideal``,
        ``loss_difference`` (largest relative difference from the reference's curve), ``first_loss``, ``last_loss``
        (means over the first and last tenth of the steps).
    """
    planners: Mapping[str, Any] = result["planners"]
    reference = next(iter(planners))
    warmup = result["config"]["warmup_steps"]
    samples = [[pair for rank in step for pair in rank] for step in result["samples"]]
    tokens = statistics.fmean(sum(map(sum, step)) for step in samples[warmup:])
    num_samples = statistics.fmean(len(step) for step in samples[warmup:])
    ideal = 1.0 + _discrepancy(planners[reference], "busy_s", warmup)
    reference_s = median(step_times(planners[reference])[warmup:])
    reference_loss = loss_curve(planners[reference])
    rows = {}
    for name, notes in planners.items():
        step_s, losses = median(step_times(notes)[warmup:]), loss_curve(notes)
        tenth = max(1, len(losses) // 10)
        rows[name] = {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "samples_per_s": num_samples / step_s,
            "predicted_discrepancy": _discrepancy(notes, "predicted_busy_s", warmup),
            "measured_discrepancy": _discrepancy(notes, "busy_s", warmup),
            "exchange_s": median([statistics.fmean(r) for r in zip(*notes["exchange_s"], strict=True)][warmup:]),
            "megabytes": statistics.fmean(map(sum, zip(*notes["bytes_sent"], strict=True))) / 1e6,
            "prepare_ms": 1e3 * median([max(r) for r in zip(*notes["prepare_s"], strict=True)][warmup:]),
            "predicted_step_s": median([max(r) for r in zip(*notes["predicted_step_s"], strict=True)][warmup:]),
            "speedup": reference_s / step_s,
            "ideal_speedup": ideal,
            "of_ideal": reference_s / step_s / ideal,
            "loss_difference": max(
                abs(a - b) / max(abs(b), 1e-300) for a, b in zip(losses, reference_loss, strict=True)
            ),
            "first_loss": statistics.fmean(losses[:tenth]),
            "last_loss": statistics.fmean(losses[-tenth:]),
        }
    return rows


def _discrepancy(notes: Mapping[str, Any], measure: str, warmup: int) -> float:
    steps = [ranks for ranks in list(zip(*notes[measure], strict=True))[warmup:] if None not in ranks]
    return statistics.median(max_over_mean(ranks) for ranks in steps) - 1.0 if steps else 0.0


def calibration_line(result: Mapping[str, Any]) -> str:
    """What was calibrated, or that nothing was."""
    found = result["calibration"]
    if found is None:
        return "cost model: as given"
    cost = found["cost"]
    links = f", links {cost['machine']['intra_node_bytes_per_s'] / 1e9:.2f} GB/s" if result["num_ranks"] > 1 else ""
    return (
        f"cost model: {cost['flops_per_s'] / 1e9:.1f} GFLOP/s, γ {cost['gamma']:.2f}{links}; "
        f"R² {found['fit']['r2']:.4f}, held-out error "
        f"{100 * found['held_out_mape']:.1f} %; calibrated in {found['seconds']:.1f} s"
    )


Row = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the comparison, in the terminal and on the page.

    Attributes:
        title: on the page.
        short: in the terminal, over two lines.
        text: of a planner's row of ``summarize``.
    """

    title: str
    short: str
    text: Callable[[Row], str]


COLUMNS = (
    Column("step, ms", "step\nms", lambda row: f"{1e3 * row['step_s']:,.0f}"),
    Column("tokens/s", "tokens\n/s", lambda row: f"{row['tokens_per_s']:,.0f}"),
    Column("samples/s", "samples\n/s", lambda row: f"{row['samples_per_s']:.2f}"),
    Column(
        "discrepancy, predicted/measured",
        "discrepancy\npred./meas.",
        lambda row: f"{100 * row['predicted_discrepancy']:.1f}/{100 * row['measured_discrepancy']:.1f} %",
    ),
    Column("in exchanges, ms", "exch.\nms", lambda row: f"{1e3 * row['exchange_s']:,.0f}"),
    Column("sent, MB/step", "sent\nMB", lambda row: f"{row['megabytes']:,.1f}"),
    Column("speed-up", "speed\n-up ×", lambda row: f"{row['speedup']:.2f}"),
    Column("of ideal", "of\nideal", lambda row: f"{100 * row['of_ideal']:.0f} %"),
    Column("loss difference", "loss\ndiff.", lambda row: f"{row['loss_difference']:.0e}"),
)
"""In order. A new one needs its value in ``summarize`` and its line here; terminal and page follow."""


def results_table(summary: Mapping[str, Row]) -> Table:
    """The one table of a comparison; it fits 80 columns."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("planner", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column.short, justify="right", no_wrap=True)
    best = max(summary, key=lambda name: summary[name]["speedup"])
    for name, row in summary.items():
        is_best = name == best and row["speedup"] > 1
        table.add_row(name, *(c.text(row) for c in COLUMNS), style="bold green" if is_best else None)
    return table


def explanation(result: Mapping[str, Any]) -> str:
    """What the table's columns mean, and the ideal that they are compared with."""
    reference = next(iter(result["summary"]))
    ideal = result["summary"][reference]["ideal_speedup"]
    return (
        f"Ideal speed-up {ideal:.2f} ×: {reference}'s measured max/mean busy time. Medians over "
        f"{result['config']['steps'] - result['config']['warmup_steps']} steps. Discrepancy: max/mean − 1 of the "
        "ranks' busy time, waiting excluded. Exchanges: wall time, waiting included. Loss: largest relative "
        f"difference from {reference} at any step."
    )
