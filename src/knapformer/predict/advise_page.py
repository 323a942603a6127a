"""Advice on one screen."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from knapformer.predict.advise import Advice
from knapformer.predict.fitting import fitting_lines, peak_text
from knapformer.predict.subject import Subject
from knapformer.predict.words import than


def advice_table(advice: Advice) -> Table:
    """A row for each way to train; the advised planner is bold and green, what does not fit is red."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("way", "tokens/s", "speed-up", "single steps", "peak GB", "over memory"):
        table.add_column(name, justify="left" if name == "way" else "right", no_wrap=True)
    for name, way in advice.ways.items():
        if "error" in way:
            table.add_row(name, "does not fit", "", "", "", "", style="red")
            continue
        table.add_row(
            name,
            f"{way['tokens_per_s']:,.0f}",
            f"{way['gain']:.2f} ± {way['gain_error']:.2f}",
            f"{way['gain_low']:.2f} to {way['gain_high']:.2f}",
            peak_text(way),
            f"{way['steps_over_memory']} of {advice.steps}",
            style="bold green" if name == advice.planner else "red" if way["steps_over_memory"] else None,
        )
    return table


def advice_lines(advice: Advice, subject: Subject, *, shard_size: int) -> Iterator[str]:
    """What the table means."""
    yield f"Model: {subject.named}, {subject.cost.num_layers} layers."
    yield (
        f"Data: {advice.num_samples:,} samples of {advice.mean_tokens:,.0f} tokens on average, "
        f"{advice.median_tokens:,.0f} in the median, {advice.longest_tokens:,} at most. A step: up to "
        f"{advice.tokens_per_rank:,} tokens, or one longer sample, on each of {advice.num_ranks} ranks; "
        f"{advice.mean_loaded:,.0f} a rank on average, {advice.most_loaded:,.0f} in the fullest step."
    )
    yield _advice(advice)
    if advice.bags is not None:
        faster = than(advice.ways[advice.bags]["gain"], "home")
        yield f"If the layout must be fixed: {_argument(advice.bags)}, {faster}."
    yield (
        f"Memory: {advice.tokens_that_fit:,} tokens fit on a rank, parameters sharded over {shard_size} ranks; give "
        f"max_tokens_per_rank={advice.tokens_that_fit}. A rank has {subject.device.memory_bytes / 1e9:.0f} GB: "
        f"{subject.device.name} ({subject.device_chosen})."
    )
    yield from fitting_lines(advice.ways)
    alone_s, spread_s = advice.longest_s
    yield (
        f"The longest sample's activations fill {advice.longest_tokens / advice.tokens_that_fit:.2f} ranks; a training "
        f"step of it takes {_seconds(alone_s)} on one rank, {_seconds(spread_s)} over all at best."
    )
    yield (
        f"Sure? ± is two standard errors over {advice.steps} drawn steps. Times are simulated from {subject.speeds}"
        f"{'' if subject.is_measured else '; knapformer calibrate measures yours'}."
    )


def _advice(advice: Advice) -> str:
    if advice.planner is None:
        return (
            f"Advice: load fewer tokens, or use or shard over more ranks. Every way breaks the memory in some step; "
            f"the fullest has {advice.most_loaded:,.0f} tokens a rank, {advice.tokens_that_fit:,} fit."
        )
    if advice.planner == "home":
        return "Advice: do not balance. Your ranks are level as they are."
    gain = advice.ways[advice.planner]["gain"]
    others = [
        than(gain / advice.ways[name]["gain"], title)
        for name, title in (("length-grouped", "length-grouped batching"), ("whole", "whole-sequence balancing"))
        if name != advice.planner and "gain" in advice.ways[name]
    ]
    home = "home" if not advice.ways["home"]["steps_over_memory"] else "home, which would run out of memory"
    return f"Advice: {_argument(advice.planner)}: {', '.join([than(gain, home), *others])}."


def _argument(planner: str) -> str:
    """As ``Balancer`` takes it."""
    name, _, topology = planner.partition(":")
    return f"planner={name!r}, topology={topology!r}" if topology else f"planner={name!r}"


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
