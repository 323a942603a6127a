"""What the multi-process tests of the adapters run on each gloo rank."""

from __future__ import annotations

from typing import Any

import torch
from family_cases import (
    CASES,
    HOMES,
    HOMES_WITH_EMPTY_RANK,
    MAIN_CASES,
    balanced,
    balancer_of,
    keep_float64,
    loss_weights,
    one_size,
    run_batch,
    stacked,
    summed,
)
from peft import LoraConfig
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from knapformer import Balancer
from knapformer.adapters import balance, cost_of

LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "patch_embedding", "x_embedder.proj"]


def all_families(rank: int, world_size: int, names: list[str]) -> dict[Any, Any]:
    """Each case with samples everywhere, and with a rank that loads none."""
    results: dict[Any, Any] = {}
    for seed, name in enumerate(names):
        model = CASES[name].build()
        balance(model, balancer_of(model, seed))
        results[name, "full"] = balanced(name, HOMES[world_size][rank], model=model)
        if world_size > 1:
            model.zero_grad()
            ids = HOMES_WITH_EMPTY_RANK[world_size][rank]
            results[name, "empty"] = balanced(name, ids, model=model, needs_grad=False)
    return results


def sharded(rank: int, world_size: int, name: str, order: str, lora: bool, checkpoint: bool) -> dict[str, Any]:
    """FSDP2 before or after ``balance``; full gradients of what is trained, and the state dict's keys."""
    case = CASES[name]
    model = case.build()
    if lora:
        add_lora(model)
    steps = {"balance": lambda: balance(model, balancer_of(model, 7)), "shard": lambda: shard(model)}
    for step in (order, *(other for other in steps if other != order)):
        steps[step]()
    if checkpoint:
        model.enable_gradient_checkpointing()
    ids = HOMES_WITH_EMPTY_RANK[world_size][rank]
    _, arguments = stacked(case, ids, needs_grad=False)
    with keep_float64():
        output = model(**arguments)
        loss = output.rows.sum() * 0 + sum(
            (x * loss_weights(i, x)).sum() for i, x in zip(ids, output.sample, strict=True)
        )
        (loss * world_size).backward()
    return {
        "outputs": {i: x.detach() for i, x in zip(ids, output.sample, strict=True)},
        "inputs": {},
        "parameters": {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None},
        "keys": list(model.state_dict()),
    }


def in_bfloat16(rank: int, world_size: int, name: str) -> dict[str, Any]:
    """Outputs under FSDP2's mixed precision, and a backward pass."""
    case = CASES[name]
    model = case.build().float()
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    balance(model, balancer_of(model, 3))
    ids = HOMES_WITH_EMPTY_RANK[world_size][rank]
    _, arguments = stacked(case, ids, needs_grad=False)
    for key in {"timestep", "guidance"} & set(arguments):
        # FSDP2 would cast tensors; a time of 142.86 would become 143.
        arguments[key] = [value.item() for value in arguments[key]]
    output = model(**arguments)
    output.rows.float().square().sum().backward()
    outputs = {i: x.detach() for i, x in zip(ids, output.sample, strict=True)}
    return {"outputs": outputs, "inputs": {}, "parameters": {}}


def shard(model: torch.nn.Module, **options: Any) -> None:
    for name, module in model.named_modules():
        if name.split(".")[-1].isdigit() and "blocks" in name.split(".")[-2]:
            fully_shard(module, **options)
    fully_shard(model, **options)


LORA = LoraConfig(r=2, lora_alpha=4, target_modules=LORA_TARGETS)


def add_lora(model: Any) -> None:
    model.add_adapter(LORA)
    draw_lora(model)


def draw_lora(model: Any) -> None:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


SHARDED = [
    ("flux", "balance", False, True),
    ("wan", "shard", False, False),
    ("hunyuan-video", "shard", False, True),
    ("sd3.5", "balance", False, False),
    ("wan", "balance", True, True),
    ("flux", "shard", True, False),
]
"""Family, what comes first, with LoRA, with gradient checkpointing."""


BATCHED = {"some": [[0, 3], [1]], "none": [[0, 1, 3], []]}
"""Samples of each rank."""


def batched(rank: int, world_size: int, name: str, homes: str) -> dict[str, Any]:
    """Batches, of another size on each rank; parameter gradients are summed over ranks."""
    case = CASES[name]
    model = balance(case.build(), balancer_of(case.build(), 5))
    with one_size(*BATCH_SIZES[rank]):
        found = run_batch(case, model, BATCHED[homes][rank])
    return {**found, "parameters": summed(found["parameters"])}


BATCH_SIZES = [((3, 4, 6), 5), ((1, 8, 6), 3)]


def everything(rank: int, world_size: int, names: list[str]) -> dict[Any, Any]:
    results = all_families(rank, world_size, names)
    for name in MAIN_CASES.values():
        results[name, "bfloat16"] = in_bfloat16(rank, world_size, name)
        for homes in BATCHED:
            results[name, "batched", homes] = batched(rank, world_size, name, homes)
    for setting in SHARDED:
        results[setting] = sharded(rank, world_size, *setting)
    results["sd3.5", "unsplit"] = unsplit("sd3.5", HOMES[world_size][rank])
    return results


def unsplit(name: str, ids: list[int]) -> dict[str, Any]:
    """Under a plan that moves whole sequences only."""
    model = CASES[name].build()
    balance(model, Balancer(cost_of(model), planner="whole"))
    return balanced(name, ids, model=model)
