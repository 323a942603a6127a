"""Losses as users write them, on three gloo ranks of which one has no sample, and on one process that holds all data.

``scripts/losses.py`` makes the table of docs/losses.md of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from launchers import accelerator_of, in_sync
from model_cases import Sample, mmdit, pack, run, samples
from plan_cases import random_plan
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from knapformer import Balancer, CostModel, Lengths, Plan, Step
from knapformer.losses import loss_counts, reduce_loss, squared_error
from knapformer.parallel import shard

TEXT, VISUAL = [5, 0, 3, 2, 6, 1], [40, 3, 12, 1, 30, 7]
HOMES = [[[0, 1], [2]], [[], []], [[3], [4, 5]]]
"""Samples of each micro-batch of each rank."""
NUM_RANKS = len(HOMES)
REDUCTIONS = ("loss.mean()", "rank_mean", "token_mean", "sample_mean", "loss.sum()")
PLACES = ("at home", "packed")
PLANS = ("home", "whole", "ulysses", "anything", "anything else")


def small() -> nn.Module:
    return mmdit(num_double_blocks=1, num_single_blocks=1)


def everything() -> list[Sample]:
    return samples(TEXT, VISUAL, seed=4)


def planner(name: str) -> Any:
    if not name.startswith("anything"):
        return name

    def plan(lengths: Lengths) -> Plan:
        return random_plan(lengths.to_lists(), 3, random.Random(len(name)), split=0.8)

    return plan


def balancer_of(plan: str) -> Balancer:
    return Balancer(CostModel(hidden=24, num_heads=3, flops_per_s=1e9), planner=planner(plan))


def one_process(reduction: str) -> dict[str, Tensor]:
    """Gradients of the same mean or sum over all samples, without any of our helpers."""
    model = small()
    errors = [(run(model, [s]) - s.weight).square().mean(dim=1) for s in everything()]
    if reduction == "sample_mean":
        loss = torch.stack([own.mean() for own in errors]).mean()
    else:
        loss = torch.cat(errors).sum() if reduction == "loss.sum()" else torch.cat(errors).mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def lengths_of(batch: Sequence[Sample]) -> dict[str, list[int]]:
    return {"text": [len(s.text) for s in batch], "visual": [len(s.visual) for s in batch]}


def forward(model: nn.Module, step: Step, batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Packed predictions of the visual rows on this rank, and the targets at home."""
    visual, text, position_ids, conditioning, _, _ = pack([detached(s) for s in batch])
    y = model(
        step.route(visual, stream="visual"),
        step.route(text, stream="text"),
        step.route(position_ids),
        step.route_conditioning(conditioning.detach()),
        step.sequence_index,
        step.streams,
        attention=step.attention,
    )
    return y, torch.cat([torch.zeros(0, 5, dtype=torch.float64), *(s.weight for s in batch)])


def detached(sample: Sample) -> Sample:
    return Sample(**{name: x.detach() for name, x in vars(sample).items()})


def written(reduction: str, place: str, step: Step, y: Tensor, target: Tensor, batch: Sequence[Sample]) -> Tensor:
    """The loss as users write it, of the rows at home or of those that the step has put on this rank."""
    lengths = [len(s.visual) for s in batch]
    if place == "at home":
        y = step.restore(y, stream="visual")
    else:
        target = step.route(target, stream="visual")
        owners = step.sequence_index[step.streams.visual]
        lengths = torch.bincount(owners, minlength=len(step.sequence_ids)).tolist()
    errors = squared_error(y, target)
    if reduction.startswith("loss."):
        return errors.mean() if reduction == "loss.mean()" else errors.sum()
    counts = loss_counts(step, stream="visual")
    return reduce_loss(errors, reduction=reduction, lengths=lengths, **counts)


def both_jobs(rank: int, world_size: int, plans: Sequence[str]) -> tuple[Any, Any]:
    return table_job(rank, world_size, plans), helpers_job(rank, world_size)


def table_job(rank: int, _world_size: int, plans: Sequence[str] = PLANS) -> dict[Any, tuple[dict[str, Tensor], float]]:
    """Gradients, averaged over ranks by DDP, and this rank's loss: by reduction, place and plan."""
    model = DistributedDataParallel(small())
    batch = [everything()[i] for micro_batch in HOMES[rank] for i in micro_batch]
    found = {}
    for plan in plans:
        balancer = balancer_of(plan)
        for reduction in REDUCTIONS:
            for place in PLACES:
                step = balancer.prepare(lengths_of(batch))
                loss = written(reduction, place, step, *forward(model, step, batch), batch)
                loss.backward()
                found[reduction, place, plan] = (gradients(model), float(loss.detach()))
                model.zero_grad()
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for name, g in grads.items()}


WRAPPERS = ("ddp", "fsdp2", "accelerate")
ACCUMULATED = ("one step", "as loaded", "dealt out anew")
WRONG = {"own counts": "ddp", "own rank": "fsdp2", "no factor": "accelerate"}
"""Counts of the micro-batch instead of the step's; of the rank instead of all ranks'; accelerate without its factor."""


def helpers_job(rank: int, _world_size: int) -> dict[Any, dict[str, Tensor]]:
    """Gradients of an optimizer's step by wrapper, reduction, accumulation and what is wrong, if anything."""
    balancer, found = balancer_of("anything"), {}
    for wrapper in WRAPPERS:
        for reduction in ("token_mean", "sample_mean"):
            wrong = [(way, "") for way in ACCUMULATED]
            wrong += [("as loaded", fault) for fault, where in WRONG.items() if where == wrapper]
            for way, fault in wrong:
                found[wrapper, reduction, way, fault] = one_step(rank, balancer, wrapper, reduction, way, fault)
    return found


def one_step(rank: int, balancer: Balancer, wrapper: str, reduction: Any, way: str, fault: str) -> dict[str, Tensor]:
    model, micro_step, backward, divides_by = wrapped(wrapper, 1 if way == "one step" else 2)
    batches, steps = micro_batches(rank, balancer, way)
    for i, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        counts = loss_counts(*([step] if fault == "own counts" else steps), stream="visual")
        lengths = [len(s.visual) for s in batch]
        if fault == "own rank":
            counts |= {"num_tokens": max(sum(lengths), 1), "num_samples": max(len(lengths), 1)}
        with micro_step(i == len(steps) - 1):
            y, target = forward(model, step, batch)
            errors = squared_error(step.restore(y, stream="visual"), target)
            factor = 1 if fault == "no factor" else divides_by
            loss = reduce_loss(errors, reduction=reduction, lengths=lengths, backward_divides_by=factor, **counts)
            backward(loss)
    return gradients(model)


def micro_batches(rank: int, balancer: Balancer, way: str) -> tuple[list[list[Sample]], list[Step]]:
    data = everything()
    loaded = [[data[i] for i in ids] for ids in HOMES[rank]]
    flat = [sample for batch in loaded for sample in batch]
    if way == "dealt out anew":
        dealt = balancer.prepare_micro_batches([lengths_of(batch) for batch in loaded])
        return [[flat[i] for i in ids] for _, ids in dealt], [step for step, _ in dealt]
    batches = [flat] if way == "one step" else loaded
    return batches, [balancer.prepare(lengths_of(batch)) for batch in batches]


def wrapped(wrapper: str, num_micro_batches: int) -> tuple[nn.Module, Callable[[bool], Any], Any, int]:
    """A model, what each micro-step runs in, what calls backward, and by what that divides."""
    if wrapper == "accelerate":
        accelerator = accelerator_of(gradient_accumulation_steps=num_micro_batches)
        model = accelerator.prepare(small())
        return model, lambda _last: accelerator.accumulate(model), accelerator.backward, num_micro_batches
    model = shard(small()) if wrapper == "fsdp2" else DistributedDataParallel(small())
    return model, lambda last: in_sync(model, last), Tensor.backward, 1


def relative(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """‖difference‖ / ‖wanted‖ of all gradients as one vector."""
    return float((flat(found, wanted) - flat(wanted, wanted)).norm() / flat(wanted, wanted).norm())


def multiple(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The number c by which ``found`` is closest to c · ``wanted``."""
    a, b = flat(found, wanted), flat(wanted, wanted)
    return float(a @ b / (b @ b))


def flat(gradients_of: dict[str, Tensor], like: dict[str, Tensor]) -> Tensor:
    assert set(gradients_of) == set(like)
    return torch.cat([gradients_of[name].flatten() for name in like])


def cells(ranks: Sequence[dict[Any, Any]], plans: Sequence[str] = PLANS) -> Iterator[dict[str, Any]]:
    """Each reduction and place: the largest error from plan to plan, the error to one process, values logged."""
    for reduction in REDUCTIONS:
        wanted = one_process(reduction)
        for place in PLACES:
            found = {plan: ranks[0][reduction, place, plan][0] for plan in plans}
            first = found[plans[0]]
            worst = max(plans, key=lambda plan: relative(found[plan], wanted))
            scale = multiple(found[worst], wanted)
            scaled = {name: x * scale for name, x in wanted.items()}
            yield {
                "reduction": reduction,
                "place": place,
                "plan_to_plan": max(relative(found[plan], first) for plan in plans),
                "one_process": relative(found[worst], wanted),
                "multiple": scale if relative(found[worst], scaled) < 1e-10 else None,
                "without_samples": ranks[1][reduction, place, "home"][1],
            }
