"""What the tests of wrappers run on each of two gloo ranks: one step, validation on one rank, another step."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rank_jobs
import torch
from family_cases import ALL, CASES, HOMES, HOMES_WITH_EMPTY_RANK, balancer_of, keep_float64, loss_weights, stacked
from launchers import accelerator_of
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from knapformer.adapters import balance, prepare, unbalance, unbalanced

Wrap = Callable[[Any], Any]


@dataclass(frozen=True)
class Job:
    """A way to wrap a transformer.

    Attributes:
        wrap: what the trainer does.
        balance_first: before the trainer does it, or after.
        has_lora: only LoRA layers are trained.
        samples_alone: rank 0 alone may run the transformer: it holds all parameters.
    """

    wrap: Wrap
    case: str = "flux"
    balance_first: bool = False
    has_lora: bool = False
    samples_alone: bool = True


def fsdp1(model: Any) -> Any:
    blocks = {type(block) for block in getattr(model, "blocks", None) or model.transformer_blocks}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(blocks), use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(model: Any) -> Any:
    rank_jobs.shard(model)
    return model


def accelerated(model: Any, **options: Any) -> Any:
    return accelerator_of(**options).prepare(model)


ddp = DistributedDataParallel

JOBS = {
    "ddp": Job(ddp),
    "ddp, balanced first": Job(ddp, balance_first=True),
    "ddp, unused parameters": Job(functools.partial(ddp, find_unused_parameters=True), "wan"),
    "ddp, static graph": Job(functools.partial(ddp, static_graph=True), "wan"),
    "ddp, lora": Job(ddp, "wan", has_lora=True),
    "fsdp1": Job(fsdp1, samples_alone=False),
    "fsdp2": Job(fsdp2, samples_alone=False),
    "accelerate": Job(accelerated, "wan"),
}


def all_wrappers(rank: int, world_size: int) -> dict[str, Any]:
    return {name: run(rank, world_size, job) for name, job in JOBS.items()} | {"losses": losses(rank, world_size)}


LOSSES = [
    (name, reduction, homes)
    for name, reduction in (
        ("ddp", "token_mean"),
        ("fsdp2", "sample_mean"),
        ("accelerate", "token_mean"),
        ("accelerate", "sample_mean"),
    )
    for homes in ("some", "none")
]
"""Job, reduction, and whether both ranks have samples."""


def losses(rank: int, world_size: int) -> dict[Any, Any]:
    """Parameter gradients and this rank's value of ``output.loss``."""
    found = {}
    for name, reduction, homes in LOSSES:
        job = JOBS[name]
        case = CASES[job.case]
        model = case.build()
        wrapped = job.wrap(balance(model, balancer_of(model, 3)))
        ids = (HOMES if homes == "some" else HOMES_WITH_EMPTY_RANK)[world_size][rank]
        with keep_float64():
            output = wrapped(**stacked(case, ids, needs_grad=False)[1])
            loss = output.loss(
                [loss_weights(i, x) for i, x in zip(ids, output.sample, strict=True)], reduction=reduction
            )
            loss.backward()
        found[name, reduction, homes] = (gradients(wrapped), float(loss.detach()))
    return found


def mean_loss(name: str, reduction: str) -> dict[str, torch.Tensor]:
    """Parameter gradients of the mean over all samples, by diffusers' own forward on one process."""
    case = CASES[JOBS[name].case]
    model, errors = case.build(), []
    with keep_float64():
        for i in ALL:
            arguments = {k: v if k in case.shared else v[None] for k, v in case.sample(i).items()}
            out = model(**arguments).sample[0]
            errors.append((out - loss_weights(i, out)).square().flatten())
        (torch.cat(errors) if reduction == "token_mean" else torch.stack([e.mean() for e in errors])).mean().backward()
    return gradients(model)


def run(rank: int, world_size: int, job: Job) -> dict[str, Any]:
    model = CASES[job.case].build()
    if job.has_lora:
        rank_jobs.add_lora(model)
        model.requires_grad_(False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    balancer = balancer_of(model, 3)
    if job.balance_first:
        wrapped = job.wrap(balance(model, balancer))
    else:
        wrapped = job.wrap(model)
        balance(wrapped, balancer)
    # FSDP2 has others in their place after a forward without gradients.
    trained = list(wrapped.parameters())
    found = one_step(rank, world_size, job, wrapped)
    own = validate(job, wrapped) if rank == 0 or not job.samples_alone else []
    for parameter in trained:
        parameter.grad = None
    again = one_step(rank, world_size, job, wrapped)
    unbalance(wrapped)
    return {**found, "again": again, "own": own}


def one_step(rank: int, world_size: int, job: Job, wrapped: Any) -> dict[str, Any]:
    """Rank 1 has no sample. The wrapper averages over ranks; the step is planned through it."""
    ids = HOMES_WITH_EMPTY_RANK[world_size][rank]
    _, arguments = stacked(CASES[job.case], ids, needs_grad=False)
    step = prepare(wrapped, **arguments)
    with keep_float64():
        output = wrapped(**arguments, step=step)
        losses = [(x * loss_weights(i, x)).sum() for i, x in zip(ids, output.sample, strict=True)]
        (sum(losses, output.rows.sum() * 0) * world_size).backward()
    return {
        "outputs": {i: x.detach().clone() for i, x in zip(ids, output.sample, strict=True)},
        "inputs": {},
        "parameters": gradients(wrapped),
    }


def gradients(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    """By the transformer's own names, whole."""
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            return _named_gradients(wrapped)
    return _named_gradients(wrapped)


def _named_gradients(wrapped: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in wrapped.named_parameters():
        if parameter.grad is not None:
            inner = re.sub(r"module\.|_orig_mod\.|_fsdp_wrapped_module\.", "", name)
            gradient = parameter.grad
            found[inner] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()
    return found


def validate(job: Job, wrapped: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """diffusers' own calls on the model in training, and on a model that was never balanced."""
    case = CASES[job.case]
    plain = case.build()
    if job.has_lora:
        rank_jobs.add_lora(plain)
    pairs = []
    with unbalanced(wrapped) as transformer, torch.no_grad(), keep_float64():
        runs = transformer if job.samples_alone else wrapped
        for i in (0, 3):
            sample = case.sample(i)
            arguments = {k: v if k in case.shared else v[None] for k, v in sample.items()}
            pairs.append((runs(**arguments).sample, plain(**arguments).sample))
    return pairs
