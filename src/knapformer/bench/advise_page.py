"""Advice on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from knapformer.bench.advise import Advice


def advice_table(advice: Advice) -> Table:
    """A row for each way to train; the advised planner is bold."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("way", "tokens/s", "gain over home", "single steps", "peak GB", "over memory"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for name, way in advice.ways.items():
        if "error" in way:
            table.add_row(name, "does not fit", "", "", "", "")
            continue
        table.add_row(
            name,
            f"{way['tokens_per_s']:,.0f}",
            f"{way['gain']:.2f} ± {way['gain_error']:.2f}",
            f"{way['gain_low']:.2f} to {way['gain_high']:.2f}",
            f"{way['peak_memory_gigabytes']:.1f}",
            f"{way['steps_over_memory']} of {advice.steps}",
            style="bold green" if name == advice.planner else None,
        )
    return table


def advice_lines(advice: Advice, *, device_name: str, is_measured: bool) -> Iterator[str]:
    """What the table means."""
    yield (
        f"Data: {advice.num_samples:,} samples of {advice.mean_tokens:,.0f} tokens on average, "
        f"{advice.median_tokens:,.0f} in the median, {advice.longest_tokens:,} at most. "
        f"A step: {advice.tokens_per_rank:,} tokens on each of {advice.num_ranks} ranks."
    )
    best = advice.ways[advice.planner]
    if advice.planner == "home":
        yield "Advice: do not balance. Your ranks are level as they are."
    else:
        grouped = advice.ways["length-grouped"].get("gain", 1.0)
        whole = advice.ways["whole"].get("gain")
        others = f"{best['gain'] / grouped:.2f} × length-grouped batching"
        others += (
            f", {best['gain'] / whole:.2f} × whole-sequence balancing" if whole and advice.planner != "whole" else ""
        )
        yield f"Advice: planner={advice.planner!r}: {best['gain']:.2f} × the throughput of home, {others}."
    if advice.bags is not None:
        yield f"If the layout must be fixed: {advice.bags!r}, {advice.ways[advice.bags]['gain']:.2f} × home."
    yield f"Memory: {advice.tokens_that_fit:,} tokens fit on a rank; give max_tokens_per_rank={advice.tokens_that_fit}."
    alone_s, spread_s = advice.longest_s
    yield (
        f"The longest sample's activations fill {advice.longest_tokens / advice.tokens_that_fit:.2f} ranks; a training "
        f"step of it takes {alone_s:.3g} s on one rank, {spread_s:.3g} s over all at best."
    )
    speeds = "measured speeds" if is_measured else f"assumed speeds of {device_name}"
    yield (
        f"Sure? ± is two standard errors over {advice.steps} drawn steps. Times are simulated from {speeds}"
        f"{'' if is_measured else '; knapformer calibrate measures yours'}."
    )
