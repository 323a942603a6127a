"""``knapformer plan``: place the sequences of one step."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from knapformer.cli.common import check_picture, parse_cap, pictured, write_text
from knapformer.cli.options import MOST_NODE, Printed
from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths, read_lengths
from knapformer.given.topology import Topology
from knapformer.plans.plan import Plan
from knapformer.plans.registry import DEFAULT_EFFORT, EFFORTS, PlannerSpec, find_planner, planner_names
from knapformer.predict.subject import DEFAULT_MODEL, Subject, find_subject
from knapformer.predict.words import than

if TYPE_CHECKING:
    from knapformer.plans.planners import Evaluation

LANES: dict[str, int | str] = {"1": 1, "2": 2, "auto": "auto"}

FILE_WIDTH = 160
"""Characters of a line that goes to a file or to another program."""


@dataclass(frozen=True, slots=True)
class Placing:
    """How a step is placed."""

    planner: Annotated[str, typer.Option(help=f"One of {planner_names()}.")] = "moldable"
    topology: Annotated[str | None, typer.Option(help="For --planner bags alone, as in g1n2+g2n1.")] = None
    model: Annotated[str | None, typer.Option(help=f"A known model; the cost file's own, or {DEFAULT_MODEL}.")] = None
    cost: Annotated[Path | None, typer.Option(help="A cost file of this model's layers.")] = None
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks with fast links among them.", min=1, max=MOST_NODE)
    ] = None
    max_tokens_per_rank: Annotated[str, typer.Option(help="Cap: a number, auto or none.")] = "auto"
    lanes: Annotated[str, typer.Option(help="1, 2 (ranks take turns between two lanes) or auto.")] = "1"
    effort: Annotated[str, typer.Option(help=f"How much moldable tries: {', '.join(EFFORTS)}.")] = DEFAULT_EFFORT

    @property
    def named(self) -> tuple[str, str | None]:
        """The planner's name and its bags, as one option gives them or two.

        Raises:
            ConfigurationError: an unknown planner, bags for one that has none, or bags twice.
        """
        name, _, bags = self.planner.partition(":")
        if bags:
            PlannerSpec.parse(self.planner)
        if bags and self.topology is not None:
            raise ConfigurationError(f"--planner {self.planner} and --topology {self.topology} both give bags")
        if self.topology is not None and not find_planner(name).needs_bags:
            raise ConfigurationError(f"--topology names bags, which {name} does not use: add --planner bags")
        return name, bags or self.topology

    @property
    def subject(self) -> Subject:
        """The model and its cost; without a cost file on the cost model's default machine."""
        found = find_subject(model=self.model, cost_file=self.cost)
        if not found.is_measured and found.model is not None:
            cost = CostModel.from_preset(found.model)
            found = replace(found, cost=cost, speeds="speeds of the cost model's default machine")
        if self.ranks_per_node is None:
            return found
        return replace(found, cost=found.cost.with_machine(ranks_per_node=self.ranks_per_node))


def plan(
    lengths: Annotated[Path, typer.Argument(help="{\"lengths\": [[rank 0's lengths], [rank 1's], …]}")],
    placing: Placing,
    printed: Printed,
    picture: Annotated[Path | None, typer.Option(help="SVG file for the tables as they are printed.")] = None,
) -> None:
    """Place the sequences of one step and say what that would gain."""
    from knapformer.plans.planners import evaluate, make_plan

    check_picture(picture, printed.as_json)
    planner, bags = placing.named
    subject = placing.subject
    cost = subject.cost
    layout = None if bags is None else Topology.parse(bags, placing.ranks_per_node)
    step, cap = read_lengths(lengths), parse_cap(placing.max_tokens_per_rank)
    if placing.lanes not in LANES:
        raise ConfigurationError(f"--lanes must be one of {', '.join(LANES)}, got {placing.lanes[:60]!r}")
    make = partial(make_plan, step, cost=cost, planner=planner, topology=layout)
    result, plan_ms = _timed(lambda: make(max_tokens_per_rank=cap, lanes=LANES[placing.lanes], effort=placing.effort))
    evaluation = evaluate(result, cost)
    if printed.output is not None:
        write_text(printed.output, json.dumps(result.to_dict()) + "\n")
    summary = {
        "model": subject.named,
        "speeds": subject.speeds,
        **_plan_summary(result, evaluation, plan_ms),
    }
    if printed.as_json:
        print(json.dumps(summary))
        return
    with pictured(picture, f"knapformer plan {lengths.name} --planner {placing.planner}") as console:
        _print(console, step, cost, result, evaluation, summary)


def _print(
    console: Console, step: Lengths, cost: CostModel, result: Plan, evaluation: Evaluation, summary: dict[str, Any]
) -> None:
    from knapformer.plans.planners import evaluate, make_plan
    from knapformer.report.grid import GRID_LEGEND, plan_table

    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    home = evaluate(make_plan(step, planner="home", cost=cost, max_tokens_per_rank=None), cost)
    console.print(_summary_table(summary, home.makespan_s))
    console.print(plan_table(result, evaluation, width=console.width))
    console.print(GRID_LEGEND, style="dim", highlight=False, markup=False)


def _timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the median milliseconds of a few calls: one where that takes long."""
    times_ms: list[float] = []
    while len(times_ms) < 5 and sum(times_ms) < 200:
        start = time.perf_counter()
        result = make()
        times_ms.append(1e3 * (time.perf_counter() - start))
    return result, statistics.median(times_ms)


def _plan_summary(result: Plan, evaluation: Evaluation, plan_ms: float) -> dict[str, Any]:
    """What ``plan --json`` prints; times and bytes are one layer's forward, but for the step's."""
    return {
        "planner": result.planner,
        "reason": result.reason,
        "lanes": result.num_lanes,
        "num_ranks": result.world_size,
        "num_sequences": result.num_sequences,
        "num_tokens": int(result.lengths.sum()),
        "makespan_s": evaluation.makespan_s,
        "step_time_s": evaluation.step_time_s,
        "lower_bound_s": evaluation.lower_bound_s,
        "tight_bound_s": evaluation.tight_bound_s,
        "discrepancy": evaluation.discrepancy,
        "bytes": evaluation.bytes,
        "moved_tokens": evaluation.moved_tokens,
        "num_split": evaluation.num_split,
        "max_rank_tokens": int(result.rank_tokens.max()),
        "max_tokens_per_rank": list(result.max_tokens_per_rank),
        "plan_ms": plan_ms,
    }


def _summary_table(summary: dict[str, Any], home_makespan_s: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    makespan_s, bound_s = summary["makespan_s"], summary["lower_bound_s"]
    over_bound = f"{makespan_s / bound_s:.4f} × the lower bound of {bound_s * 1e3:.3f} ms" if bound_s else "no work"
    beside_home = f", {than(home_makespan_s / makespan_s, 'home')}" if makespan_s else ""
    caps = summary["max_tokens_per_rank"]
    cap = f", cap {max(caps):,}" if caps else ", no cap"
    named = f"{summary['planner']}{' in two lanes' if summary['lanes'] > 1 else ''}"
    won = f" ({summary['reason']})" if summary["reason"] else ""
    sizes = "{num_sequences} sequences, {num_tokens:,} tokens on {num_ranks} ranks".format_map(summary)
    for name, value in (
        ("plan", f"{named}{won}, {summary['plan_ms']:.2f} ms"),
        ("step", sizes),
        ("model", f"{summary['model']}, {summary['speeds']}"),
        ("makespan", f"{makespan_s * 1e3:.3f} ms a layer's forward, {over_bound}{beside_home}"),
        ("training step", f"{summary['step_time_s']:.4g} s predicted"),
        ("discrepancy", f"{100 * summary['discrepancy']:.2f} %"),
        ("split", f"{summary['num_split']} sequences, {summary['bytes'] / 1e6:,.1f} MB exchanged a layer's forward"),
        ("tokens", f"{summary['max_rank_tokens']:,} on the fullest rank{cap}; {summary['moved_tokens']:,} leave home"),
    ):
        table.add_row(name, value)
    return table
