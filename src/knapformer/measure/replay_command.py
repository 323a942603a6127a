"""What ``knapformer replay`` runs: plans from files or of a workload, and a calibration where no cost file is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from knapformer.errors import ConfigurationError
from knapformer.given.cost_files import CostFile
from knapformer.given.lengths import Lengths
from knapformer.measure.calibrate_model import calibrate_model
from knapformer.measure.environment import environment
from knapformer.measure.replay import SCHEMA, replay
from knapformer.measure.runner import ModelRunner
from knapformer.plans.plan import Plan
from knapformer.plans.planners import make_plan
from knapformer.plans.registry import PlannerSpec
from knapformer.workloads.workloads import workload as draw_workload

LEAST_LONGEST_TOKENS = 512


def read_plans(files: Sequence[Path]) -> dict[str, Plan]:
    """Plans by the names of their files.

    Raises:
        ConfigurationError: two files have one name.
    """
    plans = {file.stem: Plan.read(file) for file in files}
    if len(plans) < len(files):
        raise ConfigurationError(f"plan files need names of their own, got {', '.join(map(str, files))}")
    return plans


def plan_workload(name: str, num_ranks: int | None, scale: int, seed: int) -> Lengths:
    """A workload's lengths over ``scale``, so that a small device can run them; 1 token at least."""
    rows = draw_workload(name, seed=seed, num_ranks=num_ranks)
    return Lengths.from_ranks([[max(1, length // scale) for length in row] for row in rows])


def replay_plans(
    runner: ModelRunner,
    plans: Mapping[str, Plan],
    lengths: Lengths | None,
    *,
    planners: Sequence[str],
    cost_file: CostFile | None,
    budget_s: float,
    repeats: int,
    on_rank: Callable[[], None],
) -> dict[str, Any]:
    """Calibrate unless there is a cost file, plan unless there are plans, and replay.

    Args:
        runner: what runs.
        plans: by name; or none, and then
        lengths: are planned with each of ``planners``.
        planners: as ``PlannerSpec`` reads them.
        cost_file: of ``calibrate`` for the same stand-in.
        budget_s: seconds for calibrating.
        repeats: of every measurement.
        on_rank: called after each.

    Returns:
        A results file's content.
    """
    longest = max([*(int(p.rank_tokens.max()) for p in plans.values()), LEAST_LONGEST_TOKENS])
    if lengths is not None:
        longest = max(longest, *(int(lengths.of_rank(r).sum()) for r in range(lengths.num_ranks)))
    cost, t0_s, reference_s, calibration = runner.template, 0.0, None, None
    if cost_file is None:
        found = calibrate_model(runner, budget_s=budget_s, repeats=repeats, longest_tokens=longest, on_pack=on_rank)
        cost, t0_s, calibration = found.cost, found.fit.t0_s, found.to_dict()
        reference_s = found.reference_s
    else:
        speeds, measured = cost_file.cost, cost_file.measured
        cost = replace(cost, flops_per_s=speeds.flops_per_s, gamma=speeds.gamma, machine=speeds.machine)
        t0_s, reference_s = measured.fit.t0_s, measured.reference_s
    if lengths is not None:
        plans = {
            name: make_plan(lengths, planner=spec.name, topology=spec.topology, cost=cost, max_tokens_per_rank=None)
            for name, spec in ((name, PlannerSpec.parse(name)) for name in planners)
        }
    results = replay(plans, cost, runner, t0_s=t0_s, reference_s=reference_s, repeats=repeats, on_rank=on_rank)
    return {
        "schema": SCHEMA,
        "num_ranks": next(iter(plans.values())).world_size,
        "communication": "modelled, not measured",
        "environment": environment(),
        "cost": asdict(cost),
        "calibration": calibration,
        "plans": results,
    }
