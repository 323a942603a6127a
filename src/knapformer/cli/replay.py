"""``knapformer replay``: each rank's share of plans on this one device, against the prediction."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from knapformer.cli.common import parse_names, progress_bar, stamp, write_json
from knapformer.cli.options import MOST_TOKENS, NAMES, Drawn, Printed, Stand
from knapformer.errors import ConfigurationError
from knapformer.plans.registry import PlannerSpec, planner_names
from knapformer.workloads.workloads import find_workload

if TYPE_CHECKING:
    from knapformer.given.cost_files import CostFile
    from knapformer.measure.runner import StandIn


@dataclass(frozen=True, slots=True)
class Replayed:
    """Which workload is replayed, where there are no plan files."""

    workload: Annotated[str | None, typer.Option(help=f"Instead of plan files: {NAMES}; or data codes.")] = None
    planners: Annotated[str, typer.Option(help=f"For --workload, joined by commas, of {planner_names()}.")] = (
        "home,bags:g4n2,moldable"
    )
    scale: Annotated[int, typer.Option(help="Divide the workload's lengths by this.", min=1, max=MOST_TOKENS)] = 1
    cost: Annotated[Path | None, typer.Option(help="A cost file of this model and device; else calibrate now.")] = None

    def cost_file(self, stand_in: StandIn) -> CostFile | None:
        """The cost file, if its times can be compared with the stand-in's."""
        from knapformer.given.cost_files import CostFile
        from knapformer.measure.environment import environment

        if self.cost is None:
            return None
        found = CostFile.read(self.cost)
        found.check_measured(stand_in.describe(), environment()["device"])
        return found


def replay(
    drawn: Drawn,
    stand: Stand,
    replayed: Replayed,
    printed: Printed,
    plans: Annotated[list[Path] | None, typer.Argument(help="Plan files of the same ranks.")] = None,
) -> None:
    """Run each rank's share of plans on this one device, one rank after another, and compare with the prediction."""
    if bool(plans) == (replayed.workload is not None):
        raise ConfigurationError("give plan files or --workload, one of them")
    stand.check()
    names = parse_names("--planners", replayed.planners)
    for name in names:
        PlannerSpec.parse(name)
    from knapformer.measure.replay_command import plan_workload, read_plans, replay_plans

    stand_in = stand.choose()
    cost_file = replayed.cost_file(stand_in)
    found = read_plans(plans or [])
    lengths = None
    if replayed.workload is not None:
        lengths = plan_workload(replayed.workload, drawn.ranks, replayed.scale, drawn.seed)
    runner = stand_in.build()
    with progress_bar("replaying", None) as on_rank:
        result = replay_plans(
            runner,
            found,
            lengths,
            planners=names,
            cost_file=cost_file,
            budget_s=stand.budget,
            repeats=stand.repeats,
            on_rank=on_rank,
        )
    workload_model = None if replayed.workload is None else find_workload(replayed.workload).model
    result |= {**stamp(), "model": stand.model, "workload_model": workload_model}
    result |= {"workload": replayed.workload, "scale": replayed.scale}
    if printed.output is not None:
        write_json(printed.output, result)
    if printed.as_json:
        print(json.dumps(result))
        return
    _print(result)


def _print(result: dict[str, Any]) -> None:
    from knapformer.measure.replay import replay_table

    console, model, own = Console(soft_wrap=True), result["model"], result["workload_model"]
    console.print(replay_table(result["plans"]))
    other = "" if own in (None, model) else f"; the workload's own model is {own}"
    console.print(f"Blocks of {model}{other}. Speed-ups are over {next(iter(result['plans']))}.", style="dim")
    console.print(
        "Each rank's forward and backward pass ran on this device. Communication is modelled, not measured.",
        style="dim",
    )
