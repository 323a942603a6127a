"""Balanced and unbalanced runs of the same samples on gloo ranks, compared tensor by tensor (law 3)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from model_cases import Sample, alone, dit, error, mmdit, pack, samples
from plan_cases import random_plan
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from knapformer import Balancer, CostModel, Lengths, Plan
from knapformer.parallel import checkpoint, shard

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MODELS = {"dit": dit, "mmdit": mmdit}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        planner: name, or "random" for plans that put anything anywhere, or "apart" for one with ranks that have tokens
            without heads, heads without tokens, both, and neither.
        lanes: with 2, a "random" or "apart" plan has its sequences in lanes at random; lanes of some ranks are empty.
        wrong: a fault that the comparison must notice: "scale", "drop" or "permute" a gradient of the exchange.
    """

    model: str = "mmdit"
    num_heads: int = 3
    num_kv_heads: int | None = None
    dtype: torch.dtype = torch.float64
    planner: str = "random"
    checkpoint: str | None = None
    fsdp: bool = False
    shard_size: int | None = None
    seed: int = 0
    overlap: bool = True
    lanes: int = 1
    wrong: str = ""


def homes(case: Case, world_size: int) -> tuple[list[int], list[int], list[list[int]]]:
    """Text and visual tokens of each sample, and the samples of each rank; some ranks have none."""
    rng = random.Random(case.seed)
    text, visual, ranks = [], [], []
    for rank in range(world_size):
        count = 0 if rank and rng.random() < 0.25 else rng.choice([1, 2, 3])
        ranks.append(list(range(len(text), len(text) + count)))
        text += [rng.choice([0, 1, 3, 6]) for _ in range(count)]
        visual += [rng.choice([0, 1, 2, 9, 17, 30]) for _ in range(count)]
    return text, visual, ranks


def make_planner(case: Case):
    if case.planner == "apart":
        return lambda lengths: in_lanes(plan_apart(lengths, case), case)
    if case.planner != "random":
        return case.planner

    def plan(lengths: Lengths) -> Plan:
        rng = random.Random(case.seed + 1000)
        return in_lanes(random_plan(lengths.to_lists(), case.num_heads, rng, num_kv_heads=case.num_kv_heads), case)

    return plan


def in_lanes(plan: Plan, case: Case) -> Plan:
    rng = random.Random(case.seed + 2000)
    return replace(plan, lane=[rng.randrange(2) for _ in range(plan.num_sequences)] if case.lanes > 1 else [])


def plan_apart(lengths: Lengths, case: Case) -> Plan:
    """Ranks 0 and 1 hold the tokens, ranks 1 and 2 the heads; with two ranks, the first and the second."""
    middle = 1 if lengths.num_ranks > 2 else 0
    segments, tiles = [], []
    for n in lengths.tokens.tolist():
        cut, head = n // 2 * middle, case.num_heads // 2 * middle
        segments.append([(r, a, b) for r, a, b in ((1, 0, cut), (0, cut, n)) if a < b])
        tiles.append([(r, a, b, 0, n) for r, a, b in ((2, 0, head), (1, head, case.num_heads)) if a < b and n])
    return Plan.from_placements(
        lengths=lengths.tokens.tolist(),
        homes=lengths.homes.tolist(),
        segments=segments,
        tiles=tiles,
        world_size=lengths.num_ranks,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads or case.num_heads,
        planner="apart",
    )


def build(case: Case) -> nn.Module:
    changes = {"num_kv_heads": case.num_kv_heads} if case.num_kv_heads else {}
    return MODELS[case.model](case.num_heads, **changes).to(case.dtype)


def cast(batch: list[Sample], dtype: torch.dtype) -> list[Sample]:
    """Leaves of their own in another dtype."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().to(dtype).requires_grad_(x.requires_grad)

    return [Sample(leaf(s.text), leaf(s.visual), s.position_ids, leaf(s.conditioning), leaf(s.weight)) for s in batch]


def compare(rank: int, world_size: int, case: Case, references: dict[Any, list[Tensor]]) -> dict[str, float]:
    """The largest relative error of the output and of each gradient on this rank; ``references`` are kept."""
    return compare_model(trained(case), rank, world_size, case, references)


def trained(case: Case) -> nn.Module:
    """The model as it is trained: checkpointed and sharded where the case says so."""
    model = build(case)
    if case.checkpoint:
        checkpoint(model, what=case.checkpoint)
    if case.fsdp:
        shard(model, shard_size=case.shard_size)
    return model


def compare_model(
    model: nn.Module, rank: int, world_size: int, case: Case, references: dict[Any, list[Tensor]]
) -> dict[str, float]:
    """As ``compare``, of a model that may have run other cases before."""
    text, visual, ranks = homes(case, world_size)
    everything = samples(text, visual, seed=case.seed)
    mine = cast([everything[i] for i in ranks[rank]], case.dtype)
    key = (case.model, case.num_heads, case.num_kv_heads, case.dtype, case.seed)
    if key not in references:
        references[key] = unbalanced(build(case), mine)
    model.zero_grad()
    output = balanced(model, mine, case, rank)
    weights = torch.cat([output.new_zeros(0, 5), *(s.weight for s in mine)])
    scale = world_size if case.fsdp else 1  # FSDP averages gradients
    ((output * weights).sum() * scale).backward()
    leaves = {f"{kind} of sample {i}": x for i, s in enumerate(mine) for kind, x in vars(s).items() if x.requires_grad}
    found = {name: torch.zeros_like(x) if x.grad is None else x.grad / scale for name, x in leaves.items()}
    expected, *reference = references[key]
    names = [f"parameter {name}" for name, _ in model.named_parameters()]
    errors = dict(zip(names, parameter_errors(model, reference[: len(names)], case), strict=True))
    errors |= {n: relative(x, y) for (n, x), y in zip(found.items(), reference[len(names) :], strict=True)}
    return errors | {"output": relative(output, expected)}


def unbalanced(model: nn.Module, mine: list[Sample]) -> list[Tensor]:
    """Output and gradients where every rank runs its own samples, one by one, and parameters' gradients are summed."""
    parameters = list(model.parameters())
    empty = (parameters[0].new_zeros(0, 5), [torch.zeros_like(p) for p in parameters])
    output, gradients = alone(model, mine) if mine else empty
    return [output, *summed(gradients[: len(parameters)]), *gradients[len(parameters) :]]


def summed(tensors: list[Tensor]) -> list[Tensor]:
    """Over all ranks, in one collective."""
    flat = torch.cat([x.detach().flatten() for x in tensors])
    dist.all_reduce(flat)
    return [part.view_as(x) for part, x in zip(flat.split([x.numel() for x in tensors]), tensors, strict=True)]


def relative(value: Tensor, reference: Tensor) -> float:
    """Relative to the reference, or absolute where that is zero but for rounding."""
    value, reference = value.detach(), reference.detach()
    return error(value, reference) if float(reference.norm()) > 1e-12 else float((value - reference).norm())


def parameter_errors(model: nn.Module, references: list[Tensor], case: Case) -> list[float]:
    """Of each parameter's gradient, summed over the ranks; of shards without putting them together."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    if not case.fsdp:
        return [relative(x, y) for x, y in zip(summed(gradients), references, strict=True)]
    norms = []
    for x, y in zip(gradients, references, strict=True):
        shard_of_y = distribute_tensor(y, x.device_mesh, x.placements, src_data_rank=None).to_local()
        norms.append(torch.stack([(x.to_local() - shard_of_y).norm(), shard_of_y.norm()]).square())
    (total,) = summed([torch.stack(norms)])
    return [float((d / r if r > 1e-24 else d).sqrt()) for d, r in total]


def balanced(model: nn.Module, mine: list[Sample], case: Case, rank: int) -> Tensor:
    """(visual rows at home, 5): route, model, restore."""
    cost = CostModel(hidden=8 * case.num_heads, num_heads=case.num_heads, flops_per_s=1e9)
    balancer = Balancer(
        cost,
        planner=make_planner(case),
        topology=topology(case),
        num_kv_heads=case.num_kv_heads,
        overlap=case.overlap,
        lanes=case.lanes,
    )
    visual, text, position_ids, conditioning, _, streams = pack(mine)
    # Without samples these are new leaves; ranks must agree on what requires gradients.
    visual, text, conditioning = (
        x if x.requires_grad else x.to(case.dtype).requires_grad_() for x in (visual, text, conditioning)
    )
    visual, text, conditioning = (x.to(case.dtype) for x in (visual, text, conditioning))
    counts = {"text": [len(s.text) for s in mine], "visual": [len(s.visual) for s in mine]}
    if case.model == "dit":
        position_ids = position_ids.index_select(0, streams.visual)
        step = balancer.prepare(counts["visual"], num_rows=len(visual))
        visual, position_ids = step.route(visual, position_ids)
        conditioning = spoil(step.route_conditioning(conditioning), case, rank)
        y = model(visual, position_ids, conditioning, step.sequence_index, attention=step.attention)
        return step.restore(y)
    step = balancer.prepare(counts, num_rows=len(position_ids))
    position_ids = step.route(position_ids)
    text, visual = step.route(text, stream="text"), step.route(visual, stream="visual")
    conditioning = spoil(step.route_conditioning(conditioning), case, rank)
    y = model(visual, text, position_ids, conditioning, step.sequence_index, step.streams, attention=step.attention)
    return step.restore(y, stream="visual")


def topology(case: Case) -> str | None:
    return f"g{dist.get_world_size()}n1" if case.planner == "bags" else None


def spoil(x: Tensor, case: Case, rank: int) -> Tensor:
    """Leave the forward pass alone and falsify the gradient on one rank."""
    if not case.wrong or rank != dist.get_world_size() - 1:
        return x
    change = {"scale": lambda g: g * 1.001, "drop": torch.zeros_like, "permute": lambda g: g.roll(1, dims=1)}
    x = x * 1
    if x.requires_grad:
        x.register_hook(change[case.wrong])
    return x


def compare_all(rank: int, world_size: int, cases: list[Case]) -> list[dict[str, float]]:
    references: dict[Any, list[Tensor]] = {}
    return [compare(rank, world_size, case, references) for case in cases]
