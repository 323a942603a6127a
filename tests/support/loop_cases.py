"""Training loops as trainers write them, on gloo ranks, and the same loop in one process that holds all samples.

Two steps of SGD with momentum, each of two micro-batches whose samples lie on other ranks, clipped in the second, and a
moving average of the weights. Some rank has no sample in a micro-batch, and with four ranks one has none at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import rank_jobs
import torch
import torch.distributed as dist
from family_cases import ALL, CASES, balancer_of, keep_float64, loss_weights, stacked
from launchers import accelerator_of, fsdp2_accelerator_of, in_sync
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from knapformer.adapters import balance, prepare

STEPS = 2
MICRO_BATCHES = {
    2: [[[0, 1, 2], []], [[3], [4, 5]]],
    4: [[[0, 1], [2], [], []], [[3], [], [4, 5], []]],
}
"""By number of ranks: of each micro-batch, the samples of each rank."""
MAX_NORMS, DECAY = (1e6, 0.05), 0.75
"""Of gradients, by step: the first step sees a wrong factor, which clipping takes away again, the second one clips."""


@dataclass(frozen=True)
class Loop:
    """A trainer.

    Attributes:
        make: of the model, a ``Trainer``.
        num_ranks: it is run on.
        lora: only LoRA layers are trained; ``inside`` the transformer, or a ``PeftModel`` around it.
        recomputes: with the model's activation checkpointing.
        balance_first: before it is wrapped, or after.
        fault: what the loop does wrong, for negative controls.
    """

    make: Callable[[Any], Trainer]
    case: str = "flux"
    num_ranks: int = 2
    lora: str = ""
    recomputes: bool = False
    balance_first: bool = True
    fault: str = ""


@dataclass
class Trainer:
    """What a launcher has made of model and optimizer.

    Attributes:
        micro_step: a context for a micro-step, told whether it is a step's last one.
        backward_divides_by: what ``backward`` divides the loss by.
    """

    model: nn.Module
    optimizer: Any
    micro_step: Callable[[bool], Any]
    backward: Callable[[Tensor], None] = Tensor.backward
    clip: Callable[[list[Any], float], Any] = nn.utils.clip_grad_norm_
    backward_divides_by: int = 1
    accelerator: Any = None


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def ddp(model: Any) -> Trainer:
    wrapped = DistributedDataParallel(model)
    return Trainer(wrapped, sgd(wrapped), lambda last: in_sync(wrapped, last))


def fsdp2(model: Any) -> Trainer:
    rank_jobs.shard(model)
    return Trainer(model, sgd(model), lambda last: in_sync(model, last))


def hsdp(model: Any) -> Trainer:
    rank_jobs.shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return Trainer(model, sgd(model), lambda last: in_sync(model, last))


def accelerated(model: Any) -> Trainer:
    return prepared(model, accelerator_of(gradient_accumulation_steps=len(MICRO_BATCHES[2])))


def accelerated_fsdp2(model: Any) -> Trainer:
    blocks = sorted({type(block).__name__ for block in [*model.transformer_blocks, *model.single_transformer_blocks]})
    trainer = prepared(model, fsdp2_accelerator_of(blocks, gradient_accumulation_steps=len(MICRO_BATCHES[2])))
    assert all(isinstance(p, DTensor) for p in trainer.model.parameters())
    return trainer


def prepared(model: Any, accelerator: Any) -> Trainer:
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    return Trainer(
        wrapped,
        optimizer,
        lambda _last: accelerator.accumulate(wrapped),
        accelerator.backward,
        accelerator.clip_grad_norm_,
        len(MICRO_BATCHES[2]),
        accelerator,
    )


LOOPS = {
    "ddp": Loop(ddp, recomputes=True),
    "fsdp2": Loop(fsdp2, "wan", recomputes=True),
    "fsdp2, balanced last": Loop(fsdp2, balance_first=False),
    "hsdp": Loop(hsdp, num_ranks=4, recomputes=True),
    "accelerate": Loop(accelerated),
    "accelerate, lora": Loop(accelerated, lora="inside", recomputes=True),
    "accelerate, peft": Loop(accelerated, "wan", lora="around", recomputes=True),
    "accelerate, fsdp2": Loop(accelerated_fsdp2, recomputes=True),
}
FAULTS = {
    "nothing is clipped": replace(LOOPS["ddp"], fault="clip"),
    "accelerate's division is forgotten": replace(LOOPS["accelerate"], fault="factor"),
    "each micro-batch is a mean": replace(LOOPS["fsdp2"], fault="steps"),
    "the state is not loaded": replace(LOOPS["accelerate, fsdp2"], fault="state"),
}
"""Loops that train something else."""


def build(loop: Loop) -> Any:
    model = CASES[loop.case].build()
    if loop.recomputes:
        model.enable_gradient_checkpointing()
    if not loop.lora:
        return model
    if loop.lora == "around":
        model = peft.get_peft_model(model, rank_jobs.LORA)
        rank_jobs.draw_lora(model)
    else:
        rank_jobs.add_lora(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def target(step: int, i: int, like: Tensor) -> Tensor:
    return loss_weights(i, like) * (step + 1)


class Average:
    """Of the weights that are trained, as trainers keep it: after each step, of what this rank holds."""

    def __init__(self, model: nn.Module) -> None:
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: p.detach().clone() for name, p in self.trained.items()}

    def update(self) -> None:
        for name, p in self.trained.items():
            self.values[name].lerp_(p.detach(), 1 - DECAY)


def one_process(loop: Loop) -> dict[str, dict[str, Tensor]]:
    """Weights, their average and the last gradients, by diffusers' own forward on all samples."""
    model, case = build(loop), CASES[loop.case]
    optimizer, average = sgd(model), Average(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        errors = []
        with keep_float64():
            for i in ALL:
                arguments = {k: v if k in case.shared else v[None] for k, v in case.sample(i).items()}
                out = model(**arguments).sample[0]
                errors.append((out - target(step, i, out)).square().flatten())
            torch.cat(errors).mean().backward()
        norm = nn.utils.clip_grad_norm_(list(average.trained.values()), MAX_NORMS[step])
        assert step == 0 or norm > 2 * MAX_NORMS[step], "else clipping is not seen"
        optimizer.step()
        average.update()
    return whole(average)


def whole(average: Average) -> dict[str, dict[str, Tensor]]:
    """By the transformer's own names. Every rank calls it where weights are sharded."""

    def full(values: dict[str, Any]) -> dict[str, Tensor]:
        named = {name.removeprefix("module."): x for name, x in values.items() if x is not None}
        return {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).clone() for name, x in named.items()}

    gradients = {name: p.grad for name, p in average.trained.items()}
    return {
        "weights": full({name: p.detach() for name, p in average.trained.items()}),
        "average": full(average.values),
        "gradients": full(gradients),
    }


def run_loops(rank: int, world_size: int, names: list[str], folder: str) -> dict[str, Any]:
    return {name: run((LOOPS | FAULTS)[name], rank, world_size, Path(folder) / name) for name in names}


def run(loop: Loop, rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Two steps; under accelerate also the second one alone, from the state that was saved after the first."""
    trainer = balanced_trainer(loop)
    average = Average(trainer.model)
    for step in range(STEPS):
        train_step(loop, trainer, average, step, [homes[rank] for homes in MICRO_BATCHES[world_size]])
        if trainer.accelerator is not None and step == 0:
            trainer.accelerator.save_state(str(folder))
            dist.barrier()
    found = whole(average)
    if trainer.accelerator is not None:
        resumed = balanced_trainer(loop)
        if loop.fault != "state":
            resumed.accelerator.load_state(str(folder))
        average = Average(resumed.model)
        train_step(loop, resumed, average, 1, [homes[rank] for homes in MICRO_BATCHES[world_size]])
        found["resumed"] = whole(average)["weights"]
    return found


def balanced_trainer(loop: Loop) -> Trainer:
    model = build(loop)
    balancer = balancer_of(model, 3)
    if loop.balance_first:
        return loop.make(balance(model, balancer))
    trainer = loop.make(model)
    balance(trainer.model, balancer)
    return trainer


def train_step(loop: Loop, trainer: Trainer, average: Average, step: int, micro_batches: list[list[int]]) -> None:
    trainer.optimizer.zero_grad()
    batches = [stacked(CASES[loop.case], ids, needs_grad=False)[1] for ids in micro_batches]
    planned = [prepare(trainer.model, **batch) for batch in batches]
    for k, (ids, batch) in enumerate(zip(micro_batches, batches, strict=True)):
        is_last = k == len(batches) - 1
        with trainer.micro_step(is_last), keep_float64():
            output = trainer.model(**batch, step=planned[k])
            wanted = [target(step, i, x) for i, x in zip(ids, output.sample, strict=True)]
            steps = planned[k : k + 1] if loop.fault == "steps" else planned
            factor = 1 if loop.fault == "factor" else trainer.backward_divides_by
            loss = output.loss(wanted, reduction="token_mean", steps=steps, backward_divides_by=factor)
            trainer.backward(loss)
            if is_last:
                most = float("inf") if loop.fault == "clip" else MAX_NORMS[step]
                trainer.clip(list(average.trained.values()), most)
                trainer.optimizer.step()
                average.update()
