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
from knapformer.given.shapes import model_shape
from knapformer.measure.calibrate_model import calibrate_model
from knapformer.measure.environment import environment
from knapformer.measure.links import measure_links
from knapformer.measure.runner import DEMO, ModelRunner

SCHEMA = "knapformer.cost/1"


def calibrate_to_cost_file(
    runner: ModelRunner,
    model: str,
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
    found = calibrate_model(runner, budget_s=budget_s, repeats=repeats, longest_tokens=longest_tokens, on_pack=on_pack)
    cost = found.cost
    if model != DEMO:
        cost = CostModel.from_shape(
            model_shape(model),
            flops_per_s=cost.flops_per_s,
            gamma=cost.gamma,
            machine=replace(cost.machine, communication_scale=3 / 4 if runner.recompute else 2 / 3),
            pass_factor=RECOMPUTE_PASSES if runner.recompute else PLAIN_PASSES,
        )
    measured = {
        **found.to_dict(),
        **runner.describe(model),
        "environment": environment(),
    }
    return {"schema": SCHEMA, **cost.to_dict(), "measured": measured}


def calibrate_links(cost: CostModel | None) -> dict[str, Any] | None:
    """Measure the links between torchrun's ranks, and put them into a cost file's content.

    Returns:
        The content on the first rank, None on the others.

    Raises:
        ConfigurationError: torchrun did not start this process, or there is one rank only.
    """
    if "RANK" not in os.environ:
        raise ConfigurationError("--links needs ranks: torchrun --nproc-per-node 8 -m knapformer calibrate --links")
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
    if group.rank != 0:
        return None
    fastest, slowest = links.get("intra_node"), links.get("inter_node")
    changes: dict[str, Any] = {
        "ranks_per_node": int(os.environ["LOCAL_WORLD_SIZE"]),
        "latency_s": max(link.latency_s for link in links.values()),
    }
    if fastest is not None:
        changes["intra_node_bytes_per_s"] = fastest.bytes_per_s
    if slowest is not None:
        changes["inter_node_bytes_per_s"] = slowest.bytes_per_s
    found = (CostModel() if cost is None else cost).with_machine(**changes)
    measured = {"links": {name: asdict(link) for name, link in links.items()}, "environment": environment()}
    return {"schema": SCHEMA, **found.to_dict(), "measured": measured}
