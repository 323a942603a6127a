"""One soak case on the ranks: the balanced run, the unbalanced one, and one in float64, tensor by tensor."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import balanced_cases
import torch
import torch.distributed as dist
from balanced_cases import plan_apart, summed
from plan_cases import random_plan
from soak_cases import SoakCase
from soak_reference import (
    DTYPES,
    INPUTS,
    WIDTHS,
    Result,
    SoakSample,
    build,
    grad_of,
    joined,
    make_samples,
    pooled,
    precision,
    recast,
    unbalanced,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from knapformer import Balancer, CostModel, Lengths, Plan
from knapformer.execution.rows import RowIndex
from knapformer.models import DiT, layers
from knapformer.models.dit import Place
from knapformer.models.rope import rotations
from knapformer.parallel import checkpoint, checkpointed, shard


class Finding(NamedTuple):
    """Norms of one tensor's differences, in float64: (kind, name), then balanced − unbalanced, balanced − exact,
    unbalanced − exact, the exact tensor, and its number of elements."""

    kind: str
    name: str
    apart: float
    error: float
    own_error: float
    norm: float
    size: int


def run_case(rank: int, world_size: int, state: dict[Any, Any], case: SoakCase) -> list[Finding]:
    """Every rank calls it with the same case; each finds out about its own samples, rank 0 about parameters too."""
    model = build(case)
    loaded = [make_samples(step, rank, case, number) for number, step in enumerate(case.steps)]
    alone = unbalanced(model, [s for step in loaded for s in step], case)
    exact = alone
    if case.precision != "float64":
        wide = [recast(s, torch.float64) for step in loaded for s in step]
        exact = unbalanced(copy.deepcopy(model).double(), wide, case, exact=True)
    together, trained = balanced(copy.deepcopy(model), loaded, case, state)
    findings = []
    for number, step in enumerate(loaded):
        first = sum(map(len, loaded[:number]))
        of = range(first, first + len(step))
        runs = (together, alone, exact)
        findings.append(compare("output", f"step {number}", *(joined([r.outputs[i] for i in of]) for r in runs)))
        for name in INPUTS:
            parts = (joined([r.inputs[i][name] for i in of]) for r in runs)
            findings.append(compare(name, f"step {number}", *parts))
    return findings + compare_parameters(trained, together, alone, exact, rank)


def balanced(
    model: nn.Module, loaded: list[list[SoakSample]], case: SoakCase, state: dict[Any, Any]
) -> tuple[Result, list[Tensor]]:
    """The balanced run, and the parameters that were trained, for their sharding."""
    if case.checkpoint:
        checkpoint(model, what=case.checkpoint)  # type: ignore[arg-type]  # drawn from what it takes
    if case.fsdp:
        narrow = DTYPES[case.precision] if case.precision in ("bfloat16", "float16") else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if narrow else None)
        shard(model.float() if narrow else model, mesh=mesh(case, state), mp_policy=policy)
    samples_of = [sample for step in loaded for sample in step]
    balancer = make_balancer(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = Gradients(trained, case)
    result = Result({}, {}, [])
    for outputs, ids in train(model, balancer, loaded, case, gradients):
        weights = [samples_of[i].weight for i in ids]
        for i, part in zip(ids, outputs.detach().split([len(w) for w in weights]), strict=True):
            result.outputs[i] = part
    for i, sample in enumerate(samples_of):
        leaves = {name: getattr(sample, name) for name in INPUTS}
        result.inputs[i] = {n: grad_of(x, x.grad) if x.requires_grad else x[:0] for n, x in leaves.items()}
    result.parameters = gradients.over_all_ranks()
    forget(balancer)
    return result, trained


def mesh(case: SoakCase, state: dict[Any, Any]) -> Any:
    """One for each size of shards: a mesh makes groups."""
    size = case.shard_size or case.world_size
    if ("mesh", size) not in state:
        shape = (case.world_size,) if size == case.world_size else (case.world_size // size, size)
        state["mesh", size] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    return state["mesh", size]


def make_balancer(case: SoakCase) -> Balancer:
    return Balancer(
        make_cost(case),
        planner=make_planner(case),
        topology=case.topology,
        num_kv_heads=case.plan_kv_heads,
        overlap=case.overlap,
        lanes=case.lanes,
    )


def make_cost(case: SoakCase) -> CostModel:
    return CostModel(hidden=8 * case.plan_heads, num_heads=case.plan_heads, flops_per_s=1e9)


def make_planner(case: SoakCase) -> Any:
    heads = {"num_heads": case.plan_heads, "num_kv_heads": case.plan_kv_heads}
    in_lanes = functools.partial(balanced_cases.in_lanes, case=balanced_cases.Case(lanes=case.lanes, seed=case.seed))
    if case.planner not in ("random", "apart"):
        return case.planner

    def plan(lengths: Lengths) -> Plan:
        if case.planner == "apart" and lengths.num_ranks > 1:
            return in_lanes(plan_apart(lengths, balanced_cases.Case(**heads)))
        rng = random.Random(case.seed + lengths.num_tokens)
        return in_lanes(random_plan(lengths.to_lists(), rng=rng, **heads))

    return plan


def forget(balancer: Balancer) -> None:
    """Give back the groups that a balancer made; a soak makes thousands."""
    dist.barrier()
    for group in {id(g): g for g in (balancer.group.control, balancer.group.data)}.values():
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def train(
    model: nn.Module, balancer: Balancer, loaded: list[list[SoakSample]], case: SoakCase, gradients: Gradients
) -> Iterator[tuple[Tensor, list[int]]]:
    """The output of each step, with the samples that it belongs to, forward and backward in the case's order."""
    steps = prepare(balancer, loaded, case)
    flat = [sample for step in loaded for sample in step]
    batches = [[flat[i] for i in ids] for _, ids in steps]
    warm_up(model, balancer, steps[0][0], batches[0], case)
    if case.order in ("in turn", "micro-batches"):
        for (step, ids), batch in zip(steps, batches, strict=True):
            output = forward(model, step, batch, case)
            gradients.backward([output], [batch])
            yield output, ids
        return
    if case.order == "interleaved":
        outputs = forward_in_turns(model, [step for step, _ in steps], batches, case)
    else:
        outputs = [forward(model, step, batch, case) for (step, _), batch in zip(steps, batches, strict=True)]
    passes = [[i] for i in range(len(steps))] if case.order != "one loss" else [list(range(len(steps)))]
    for chosen in reversed(passes) if case.order == "alive, last first" else passes:
        gradients.backward([outputs[i] for i in chosen], [batches[i] for i in chosen])
    yield from zip(outputs, [ids for _, ids in steps], strict=True)


def prepare(balancer: Balancer, loaded: list[list[SoakSample]], case: SoakCase) -> list[tuple[Any, list[int]]]:
    """Steps, and which samples run in each. Every rank calls it."""
    lengths = [lengths_of(step, case) for step in loaded]
    context = [[len(s.context) for s in step] for step in loaded]
    if case.order == "micro-batches":
        everything = [rows for own in context for rows in own]
        found = balancer.prepare_micro_batches(lengths, conditioning={"context": everything})
        return [(step, list(ids)) for step, ids in found]
    starts = [sum(map(len, loaded[:i])) for i in range(len(loaded))]
    return [
        (balancer.prepare(own, conditioning={"context": rows}), list(range(start, start + len(step))))
        for own, rows, step, start in zip(lengths, context, loaded, starts, strict=True)
    ]


def lengths_of(batch: Sequence[SoakSample], case: SoakCase) -> Any:
    visual = [len(s.visual) for s in batch]
    return visual if case.model == "dit" else {"text": [len(s.text) for s in batch], "visual": visual}


def warm_up(model: nn.Module, balancer: Balancer, step: Any, batch: list[SoakSample], case: SoakCase) -> None:
    """A pass without gradients, on the step that trains next or on one of its own."""
    if not case.before:
        return
    if case.before == "validation":
        context = {"context": [len(s.context) for s in batch]}
        step = balancer.prepare(lengths_of(batch, case), conditioning=context)
    with torch.inference_mode() if case.before == "inference_mode" else torch.no_grad():
        forward(model, step, batch, case)


def routed(step: Any, batch: list[SoakSample], case: SoakCase) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """This rank's visual and text tokens, position ids and conditioning under the plan."""
    dtype = DTYPES[case.precision]

    def pack(name: str) -> Tensor:
        parts = [getattr(s, name).reshape(-1, WIDTHS[name]) for s in batch]
        if not parts:
            return torch.zeros(0, WIDTHS[name], dtype=dtype, requires_grad=name not in case.frozen)
        x = torch.cat(parts)
        return x.t().contiguous().t() if case.strided else x

    conditioning = step.route_conditioning(pack("conditioning"))
    context = step.route_conditioning(pack("context"), name="context")
    conditioning = spoil(conditioning, case) + pooled(context, step.conditioning_lengths("context"))
    ids = joined([s.position_ids for s in batch], 3, torch.int64)
    if case.model == "dit":
        visual, ids = step.route(pack("visual"), ids)
        return visual, None, ids, conditioning
    visual, text = step.route(pack("visual"), stream="visual"), step.route(pack("text"), stream="text")
    return visual, text, step.route(ids), conditioning


def spoil(x: Tensor, case: SoakCase) -> Tensor:
    """For the negative controls: a gradient that the last rank loses, or that is scaled."""
    if not case.wrong or dist.get_rank() != dist.get_world_size() - 1 or not x.requires_grad:
        return x
    x = x * 1
    x.register_hook(torch.zeros_like if case.wrong == "drop" else lambda g: g * 1.5)
    return x


class Chosen:
    """A step's attention, or a lane's, with the case's scale and causality."""

    def __init__(self, attention: Any, case: SoakCase) -> None:
        options = {"scale": case.scale, "causal": case.causal}
        self.lanes = [Chosen(lane, case) for lane in getattr(attention, "lanes", ())]
        self.num_rows = getattr(attention, "num_rows", None)
        self.call = functools.partial(attention, **options) if self.lanes else None
        self.turns = None if self.lanes else functools.partial(attention.turns, **options)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(q, k, v)


def forward(model: nn.Module, step: Any, batch: list[SoakSample], case: SoakCase) -> Tensor:
    attention = Chosen(step.attention, case)
    visual, text, ids, conditioning = routed(step, batch, case)
    with precision(case):
        if text is None:
            y = model(visual, ids, conditioning, step.sequence_index, attention=attention)
            return step.restore(y)
        y = model(visual, text, ids, conditioning, step.sequence_index, step.streams, attention=attention)
        return step.restore(y, stream="visual")


def forward_in_turns(
    model: nn.Module, steps: list[Any], batches: list[list[SoakSample]], case: SoakCase
) -> list[Tensor]:
    """A DiT's forward passes of several steps, block by block in turns."""
    assert isinstance(model, DiT)
    config = model.config
    attentions: list[Any] = [Chosen(step.attention, case) for step in steps]
    if case.checkpoint == "attention":
        attentions = [checkpointed(attention) for attention in attentions]
    inputs = [routed(step, batch, case) for step, batch in zip(steps, batches, strict=True)]
    with precision(case):
        turns = [rotations(ids, config.rope_axes, theta=config.rope_theta, dtype=x.dtype) for x, _, ids, _ in inputs]
        conditionings = [model.conditioning_in(c) for *_, c in inputs]
        xs = [model.visual_in(x) for x, *_ in inputs]
        for block in model.blocks:
            for i, step in enumerate(steps):
                place = Place(RowIndex(step.sequence_index), turns[i], attentions[i])
                (xs[i],) = block([xs[i]], conditionings[i], [place])
        return [
            step.restore(model.output(layers.rms_norm(x), c, step.sequence_index))
            for step, x, c in zip(steps, xs, conditionings, strict=True)
        ]


class Gradients:
    """Gradients of the parameters, taken off after each backward pass and summed in float64."""

    def __init__(self, parameters: list[Any], case: SoakCase) -> None:
        self.parameters, self.case = parameters, case
        self.totals: list[Tensor] = [torch.zeros_like(local(p), dtype=torch.float64) for p in parameters]

    def backward(self, outputs: list[Tensor], batches: list[list[SoakSample]]) -> None:
        loss = torch.zeros((), dtype=torch.float64)
        for output, batch in zip(outputs, batches, strict=True):
            weights = joined([s.weight for s in batch], WIDTHS["visual"], output.dtype)
            loss = loss + (output.double() * weights.double()).sum()
        loss.backward()
        for parameter, total in zip(self.parameters, self.totals, strict=True):
            if parameter.grad is not None:
                total.add_(local(parameter.grad))
            parameter.grad = None

    def over_all_ranks(self) -> list[Tensor]:
        """Summed over the ranks; of FSDP, which averages, this rank's shards times the ranks."""
        if self.case.fsdp:
            return [total * self.case.world_size for total in self.totals]
        return summed(self.totals) if self.totals else []


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def compare(kind: str, name: str, together: Tensor, alone: Tensor, exact: Tensor) -> Finding:
    a, b, c = (x.double() for x in (together, alone, exact))
    return Finding(kind, name, *(float(x.norm()) for x in (a - b, a - c, b - c, c)), c.numel())


def compare_parameters(trained: list[Any], together: Result, alone: Result, exact: Result, rank: int) -> list[Finding]:
    findings, norms = [], []
    for number, p in enumerate(trained):
        a, b, c = (run.parameters[number] for run in (together, alone, exact))
        if isinstance(p, DTensor):
            b, c = (distribute_tensor(x, p.device_mesh, p.placements, src_data_rank=None).to_local() for x in (b, c))
        norms.append(torch.stack([x.norm() for x in (a - b, a - c, b - c, c)]).square())
        findings.append(Finding("parameters", f"parameter {number}", 0, 0, 0, 0, p.numel()))
    if trained and isinstance(trained[0], DTensor):
        norms = list(summed([torch.stack(norms)])[0])
    return [
        f._replace(apart=a, error=b, own_error=c, norm=d)
        for f, (a, b, c, d) in zip(findings, (n.sqrt().tolist() for n in norms), strict=True)
        if rank == 0
    ]
