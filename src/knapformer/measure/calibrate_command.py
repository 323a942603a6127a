"""What ``knapformer calibrate`` writes: a cost file with what was measured, where and how."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from knapformer.errors import ConfigurationError
from knapformer.execution.groups import BalancingGroup, wait_for_all
from knapformer.given.cost import PLAIN_PASSES, RECOMPUTE_PASSES, CostModel
from knapformer.given.cost_files import CostFile
from knapformer.given.shapes import DEMO, model_shape
from knapformer.measure.calibrate_model import calibrate_model
from knapformer.measure.environment import environment
from knapformer.measure.links import Link, measure_links
from knapformer.measure.runner import StandIn

SCHEMA = "knapformer.cost/1"


def calibrate_to_cost_file(
    stand_in: StandIn,
    *,
    budget_s: float,
    repeats: int,
    longest_tokens: int | None = None,
    on_pack: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure, fit, and return a cost file's content.

    The speed and γ are the stand-in's; FLOPs, layers and passes are the known model's. The demo's are those of the
    stand-in.
    """
    runner = stand_in.build()
    found = calibrate_model(runner, budget_s=budget_s, repeats=repeats, longest_tokens=longest_tokens, on_pack=on_pack)
    cost = found.cost
    if stand_in.model != DEMO:
        cost = CostModel.from_shape(
            model_shape(stand_in.model),
            flops_per_s=cost.flops_per_s,
            gamma=cost.gamma,
            machine=replace(cost.machine, communication_scale=3 / 4 if runner.recompute else 2 / 3),
            pass_factor=RECOMPUTE_PASSES if runner.recompute else PLAIN_PASSES,
        )
    measured = {
        **found.to_dict(),
        **stand_in.describe(),
        "environment": environment(),
    }
    return {"schema": SCHEMA, **cost.to_dict(), "measured": measured}


def calibrate_links(file: CostFile | None) -> dict[str, Any] | None:
    """Measure the links between torchrun's ranks, and put them into a cost file's content, whose rest stays.

    Args:
        file: of a model; None gives what was measured alone, which is no cost file.

    Returns:
        The content on the first rank, None on the others.

    Raises:
        ConfigurationError: torchrun did not start this process, or there is one rank only.
    """
    if "RANK" not in os.environ:
        raise ConfigurationError("--links needs ranks: torchrun --nproc-per-node 8 -m knapformer calibrate --links")
    links = _links_of_ranks()
    if links is None:
        return None
    measured = {"links": {name: asdict(link) for name, link in links.items()}, "links_environment": environment()}
    if file is None:
        return {"measured": measured}
    bandwidths = {f"{name}_bytes_per_s": link.bytes_per_s for name, link in links.items()}
    cost = file.cost.with_machine(
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        latency_s=max(link.latency_s for link in links.values()),
        **bandwidths,
    )
    return {"schema": SCHEMA, **cost.to_dict(), "measured": {**file.content.get("measured", {}), **measured}}


def _links_of_ranks() -> dict[str, Link] | None:
    """What ``measure_links`` says of all ranks that torchrun started; None on all of them but the first."""
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    try:
        group = BalancingGroup.create()
        links = measure_links(group)
        wait_for_all(group)
    finally:
        dist.destroy_process_group()
    return links if group.rank == 0 else None
