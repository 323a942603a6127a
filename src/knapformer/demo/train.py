"""One rank's part of a training comparison: several planners on the same data, step by step in turn.

Each planner trains a model of its own from the same parameters. In every step all planners see the same batch, one
after another and each time starting with another one, so that drift of the machine does not favour any.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from knapformer.balancer import Balancer
from knapformer.demo.config import TrainConfig
from knapformer.demo.samples import Album, SampleSpec, draw_specs
from knapformer.demo.trainee import Batch, Trainee, sample_mean_loss
from knapformer.execution.groups import BalancingGroup, gather_values, wait_for_all
from knapformer.execution.transport import Meter
from knapformer.given.cost import CostModel
from knapformer.measure.calibrate import Pack, calibrate, default_packs
from knapformer.measure.clocks import clock_of_step
from knapformer.models import MMDiTConfig, StreamIndex, local_attention
from knapformer.models.presets import cost_template, make_config
from knapformer.plans.registry import PlannerSpec
from knapformer.training.parallel import checkpoint, shard
from knapformer.workloads.codes import DataCode, parse_codes

Progress = Callable[[str, int, int], None]
"""Called with a task's name, what is done and the total."""

MEASURES = (
    "step_s",
    "busy_s",
    "exchange_s",
    "bytes_sent",
    "prepare_s",
    "loss",
    "tokens",
    "predicted_busy_s",
    "predicted_step_s",
    "lower_bound_step_s",
    "num_split",
)
"""What a rank notes in each step of each planner; ``None`` where a step does not measure it."""


@dataclass(slots=True, eq=False)
class Contestant:
    """One planner with its own copy of the model."""

    spec: PlannerSpec
    model: Trainee
    optimizer: torch.optim.Optimizer
    balancer: Balancer
    meter: Meter
    notes: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in MEASURES})


def run_rank(config: TrainConfig, group: BalancingGroup, *, ranks_per_node: int, progress: Progress) -> dict[str, Any]:
    """Calibrate, train and gather. Every rank calls it and gets the raw results of all.

    Args:
        config: the same on every rank.
        group: all ranks.
        ranks_per_node: ranks with fast links among them.
        progress: told of each measurement, on this rank.

    Returns:
        ``calibration``, ``samples`` (per step and rank, its samples' text and visual tokens) and ``planners``: for
        each, every rank's list for every name of ``MEASURES``.
    """
    album = Album()
    codes = parse_codes(config.codes)
    model_config = make_config(
        num_heads=config.num_heads,
        head_width=config.head_width,
        num_double_blocks=config.num_double_blocks,
        num_single_blocks=config.num_single_blocks,
    )
    cost, calibration = _find_cost(config, model_config, codes, group, ranks_per_node, progress)
    contestants = [_make_contestant(spec, config, model_config, cost, group) for spec in config.planners]
    for index in range(config.steps):
        specs = [_draw(config, codes, index, rank) for rank in range(group.size)]
        batch = Batch.load(
            specs[group.rank],
            album,
            text_channels=model_config.text_channels,
            dtype=torch.float64 if config.dtype == "float64" else torch.float32,
            device=group.device,
        )
        num_samples = sum(map(len, specs))
        for at in range(len(contestants)):
            contestant = contestants[(index + at) % len(contestants)]
            _train_step(contestant, batch, index, num_samples, group)
            progress("training", index * len(contestants) + at + 1, config.steps * len(contestants))
    notes = gather_values(group, [contestant.notes for contestant in contestants])
    return {
        "calibration": calibration,
        "samples": [
            [[(s.text_tokens, s.visual_tokens) for s in _draw(config, codes, i, rank)] for rank in range(group.size)]
            for i in range(config.steps)
        ],
        "planners": {
            str(spec): {name: [rank[at][name] for rank in notes] for name in MEASURES}
            for at, spec in enumerate(config.planners)
        },
    }


def _draw(config: TrainConfig, codes: list[DataCode], step_index: int, rank: int) -> list[SampleSpec]:
    """Any rank's batch of any step; every rank can tell."""
    once = [code for code in codes for _ in range(code.num_ranks)]
    rng = random.Random(f"{config.seed}/{step_index}/{rank}")
    return draw_specs(once[rank % len(once)], rng, max_text_tokens=config.max_text_tokens)


def _find_cost(
    config: TrainConfig,
    model_config: MMDiTConfig,
    codes: list[DataCode],
    group: BalancingGroup,
    ranks_per_node: int,
    progress: Progress,
) -> tuple[CostModel, dict[str, Any] | None]:
    """The cost file's model, or one that is measured now with a throw-away copy of the trained model."""
    if config.cost is not None:
        return CostModel.from_dict(config.cost), None
    template = cost_template(
        model_config,
        recompute=config.checkpoint == "block",
        bytes_per_element={"float64": 8, "float32": 4, "bfloat16": 2}[config.dtype],
        ranks_per_node=ranks_per_node,
    )
    longest = max(code.visual_tokens for code in codes) + config.max_text_tokens
    packs = default_packs(longest)
    done, total = [0], 2 * sum(map(len, packs))

    def on_pack() -> None:
        done[0] += 1
        progress("calibrating", done[0], total)

    run_pack = _pack_runner(config, model_config, group.device)
    calibration = calibrate(run_pack, template, group, packs=packs, on_pack=on_pack)
    return calibration.cost, calibration.to_dict()


def _pack_runner(config: TrainConfig, model_config: MMDiTConfig, device: torch.device) -> Callable[[Pack], None]:
    """Forward and backward of the trained model over whole sequences on this rank alone."""
    dtype = getattr(torch, config.dtype)
    torch.manual_seed(config.seed)
    model = Trainee(model_config).transformer.to(device, dtype)
    _checkpoint(model, config)

    def run(pack: Pack) -> None:
        text = [min(config.max_text_tokens, length // 3) // 2 for length in pack]
        visual = [length - tokens for length, tokens in zip(pack, text, strict=True)]

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.full((count, width), 0.5, device=device, dtype=dtype)

        index = torch.repeat_interleave(torch.arange(len(pack)), torch.tensor(pack)).to(device)
        output = model(
            rows(sum(visual), model_config.in_channels),
            rows(sum(text), model_config.text_channels),
            torch.arange(sum(pack), device=device).unsqueeze(1).expand(-1, 3),
            rows(len(pack), model_config.conditioning_channels),
            index,
            StreamIndex.from_lengths(text, visual, device=device),
            attention=local_attention(pack),
        )
        output.square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def _checkpoint(model: nn.Module, config: TrainConfig) -> None:
    if config.checkpoint == "block":
        checkpoint(model, what="block")
    elif config.checkpoint == "attention":
        checkpoint(model, what="attention")


def _make_contestant(
    spec: PlannerSpec, config: TrainConfig, model_config: MMDiTConfig, cost: CostModel, group: BalancingGroup
) -> Contestant:
    torch.manual_seed(config.seed)
    model = Trainee(model_config).to(group.device, torch.float64 if config.dtype == "float64" else torch.float32)
    _checkpoint(model.transformer, config)
    policy = None
    if config.dtype == "bfloat16":
        # The trainee casts what it computes with: FSDP would round targets and times too, or none of them in torch 2.6.
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            output_dtype=torch.float32,
            cast_forward_inputs=False,
        )
    shard(
        model,
        shard_size=config.shard_size,
        mp_policy=policy,
        reshard_after_forward=config.reshard_after_forward,
    )
    meter = Meter()
    balancer = Balancer(
        cost,
        planner=spec.name,
        topology=spec.topology,
        group=group.data,
        overlap=config.overlap,
        max_tokens_per_rank=config.max_tokens_per_rank if spec.keeps_caps else None,
        meter=meter,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    return Contestant(spec, model, optimizer, balancer, meter)


def _train_step(contestant: Contestant, batch: Batch, index: int, num_samples: int, group: BalancingGroup) -> None:
    """One optimizer step, timed from where all ranks begin to where this one ends."""
    clock, times_count = clock_of_step(index, group.device)
    wait_for_all(group)
    contestant.meter.clear()
    if clock is not None:
        clock.start()
    began = time.perf_counter()
    step = contestant.balancer.prepare(batch.lengths)
    prepared = time.perf_counter()
    loss = sample_mean_loss(contestant.model(batch, step), batch, num_samples, group.size)
    loss.backward()
    contestant.optimizer.step()
    contestant.optimizer.zero_grad(set_to_none=True)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    busy_s = None if clock is None else clock.stop()
    evaluation, cost = step.evaluation, contestant.balancer.cost
    passes = cost.num_layers * cost.pass_factor
    values = (
        ended - began if times_count else None,
        busy_s,
        contestant.meter.seconds,
        contestant.meter.bytes_sent,
        prepared - began,
        float(loss.detach()),
        step.num_tokens,
        float(evaluation.rank_busy_s[step.rank]) * passes,
        evaluation.step_time_s,
        evaluation.lower_bound_s * passes,
        evaluation.num_split,
    )
    for name, value in zip(MEASURES, values, strict=True):
        contestant.notes[name].append(value)
