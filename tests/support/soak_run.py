"""One soak case on the ranks: the balanced run, the unbalanced one, and one in float64, tensor by tensor."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import balanced_cases
import torch
import torch.distributed as dist
from balanced_cases import plan_apart, summed
from model_cases import Sample, samples
from plan_cases import random_plan
from soak_cases import Rows, SoakCase
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from knapformer import Balancer, CostModel, Lengths, Plan, make_plan
from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, StreamIndex, dit, layers, local_attention, mmdit
from knapformer.models.rope import rotations
from knapformer.parallel import checkpoint, checkpointed, shard

DTYPES = {"autocast": torch.float32} | {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}
INPUTS = ("text", "visual", "conditioning", "context")
WIDTHS = {"text": 7, "visual": 5, "conditioning": 6, "context": 6}
AXES = {6: (2, 2, 2), 8: (4, 2, 2), 10: (4, 4, 2), 16: (4, 6, 6), 32: (8, 12, 12)}


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


@dataclass
class SoakSample(Sample):
    """A sample with rows of ragged conditioning: context (K, 6)."""

    context: Tensor


@dataclass
class Result:
    """Of one run: outputs and input gradients per sample (by position), gradients of parameters over all ranks."""

    outputs: dict[int, Tensor]
    inputs: dict[int, dict[str, Tensor]]
    parameters: list[Tensor]


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


def build(case: SoakCase) -> nn.Module:
    torch.manual_seed(case.seed)
    shape = {
        "in_channels": WIDTHS["visual"],
        "conditioning_channels": WIDTHS["conditioning"],
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_width": case.head_width,
        "rope_axes": AXES[case.head_width],
    }
    model: DiT | MMDiT
    if case.model == "dit":
        model = DiT(DiTConfig(**shape, num_blocks=sum(case.num_blocks)))
    else:
        double, single = case.num_blocks
        model = MMDiT(MMDiTConfig(**shape, text_channels=7, num_double_blocks=double, num_single_blocks=single))
    model.double()
    # Rows of a matrix keep their length, whatever the model's width: activations stay within float16.
    model.reset_parameters(init_std=0.8 * model.config.width**-0.5)
    model.to(DTYPES[case.precision])
    rng = random.Random(case.seed)
    chosen = [p for p in model.parameters() if rng.random() < case.frozen_parameters]
    for parameter in chosen[1:]:
        parameter.requires_grad_(False)
    return model


def make_samples(step: Sequence[Sequence[Rows]], rank: int, case: SoakCase, number: int) -> list[SoakSample]:
    """This rank's samples of a step."""
    everything = [rows for own in step for rows in own]
    seed = 10 * case.seed + number
    drawn = samples([t for t, _, _ in everything], [v for _, v, _ in everything], seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    contexts = [torch.randn(c, 6, generator=generator, dtype=torch.float64) for _, _, c in everything]
    first = sum(map(len, step[:rank]))
    own = range(first, first + len(step[rank]))
    return [recast(SoakSample(**vars(drawn[i]), context=contexts[i]), DTYPES[case.precision], case) for i in own]


def recast(sample: SoakSample, dtype: torch.dtype, case: SoakCase | None = None) -> SoakSample:
    """Leaves of their own in another dtype; a case says which of them need gradients."""
    changed = {}
    for name, x in vars(sample).items():
        if name == "position_ids":
            changed[name] = x
            continue
        wanted = x.requires_grad if case is None else name in INPUTS and name not in case.frozen
        leaf = x.detach().to(dtype, copy=True)
        changed[name] = (leaf.t().contiguous().t() if leaf.dim() == 2 else leaf).requires_grad_(wanted)
    return SoakSample(**changed)


def precision(case: SoakCase, exact: bool = False) -> contextlib.AbstractContextManager[Any]:
    if case.precision == "autocast" and not exact:
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


# ------------------------------------------------------------------------------------------- the unbalanced run


def unbalanced(model: nn.Module, mine: Sequence[SoakSample], case: SoakCase, exact: bool = False) -> Result:
    """Every sample alone, with gradients of parameters summed in float64 over samples and ranks."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    totals = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    result = Result({}, {}, [])
    for i, sample in enumerate(mine):
        with precision(case, exact), plain_modulation():
            output = run_alone(model, sample, case)
        inputs = {name: getattr(sample, name) for name in INPUTS}
        leaves = [x for x in inputs.values() if x.requires_grad]
        loss = (output.double() * sample.weight.double()).sum()
        found = torch.autograd.grad(loss, [*parameters, *leaves], allow_unused=True)
        for total, gradient in zip(totals, found[: len(parameters)], strict=True):
            if gradient is not None:
                total.add_(gradient)
        gradients = iter(found[len(parameters) :])
        result.outputs[i] = output.detach()
        result.inputs[i] = {n: grad_of(x, next(gradients)) if x.requires_grad else x[:0] for n, x in inputs.items()}
    result.parameters = summed(totals) if totals else []
    return result


def run_alone(model: nn.Module, sample: SoakSample, case: SoakCase) -> Tensor:
    num_text, num_visual = len(sample.text), len(sample.visual)
    attention = functools.partial(local_attention([num_text + num_visual]), scale=case.scale, causal=case.causal)
    conditioning = sample.conditioning[None] + pooled(sample.context, [len(sample.context)])
    index = torch.zeros(num_text + num_visual, dtype=torch.int64)
    if case.model == "dit":
        output: Tensor = model(sample.visual, sample.position_ids, conditioning, index, attention=attention)
        return output
    streams = StreamIndex.from_lengths([num_text], [num_visual])
    visual, text = sample.visual, sample.text
    output = model(visual, text, sample.position_ids, conditioning, index, streams, attention=attention)
    return output


@contextlib.contextmanager
def plain_modulation() -> Iterator[None]:
    """Modulation of one sequence by broadcasting, as a model without packing has it: a reference of its own."""

    def modulate(x: Tensor, shift: Tensor, scale: Tensor, _index: Any) -> Tensor:
        return torch.addcmul(shift, x, 1 + scale)

    def add_gated(x: Tensor, update: Tensor, gate: Tensor, _index: Any) -> Tensor:
        return torch.addcmul(x, gate, update)

    places = [(m, f) for m in (dit, mmdit, layers) for f in (modulate, add_gated) if hasattr(m, f.__name__)]
    if len(places) < 5:
        raise AssertionError(f"modulate and add_gated have moved, found in {places}")
    before = [getattr(module, f.__name__) for module, f in places]
    for module, f in places:
        setattr(module, f.__name__, f)
    try:
        yield
    finally:
        for (module, f), old in zip(places, before, strict=True):
            setattr(module, f.__name__, old)


def pooled(context: Tensor, counts: Sequence[int]) -> Tensor:
    """(S, 6) from (K, 6): a weighted sum of each sequence's rows, which tells their order."""
    lengths = torch.tensor(list(counts), dtype=torch.int64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(index)) - (lengths.cumsum(0) - lengths)[index]
    terms = context.double().tanh() / (1 + position[:, None])
    return terms.new_zeros(len(lengths), context.shape[1]).index_add(0, index, terms).to(context.dtype)


# --------------------------------------------------------------------------------------------- the balanced run


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
    )


def make_cost(case: SoakCase) -> CostModel:
    return CostModel(hidden=8 * case.plan_heads, num_heads=case.plan_heads, flops_per_s=1e9)


def make_planner(case: SoakCase) -> Any:
    heads = {"num_heads": case.plan_heads, "num_kv_heads": case.plan_kv_heads}
    if case.planner == "apart":
        return lambda lengths: plan_apart(lengths, balanced_cases.Case(**heads))
    if case.planner == "moldable" and case.causal:
        return functools.partial(plan_with_all_queries, case=case)
    if case.planner != "random":
        return case.planner

    def plan(lengths: Lengths) -> Plan:
        rng = random.Random(case.seed + lengths.num_tokens)
        return random_plan(lengths.to_lists(), rng=rng, query_tiles=not case.causal, **heads)

    return plan


def plan_with_all_queries(lengths: Lengths, case: SoakCase) -> Plan:
    """What ``moldable`` makes, unless it has tiles of part of the queries, which causal attention refuses."""
    options: dict[str, Any] = {"cost": make_cost(case), "num_kv_heads": case.plan_kv_heads}
    plan = make_plan(lengths, **options)
    rows = plan.tile_query_end - plan.tile_query_start
    if (rows == plan.lengths[plan.tile_sequence]).all():
        return plan
    return make_plan(lengths, planner="whole", **options)


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


def forward(model: nn.Module, step: Any, batch: list[SoakSample], case: SoakCase) -> Tensor:
    attention = functools.partial(step.attention, scale=case.scale, causal=case.causal)
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
    attentions = [functools.partial(step.attention, scale=case.scale, causal=case.causal) for step in steps]
    if case.checkpoint == "attention":
        attentions = [checkpointed(attention) for attention in attentions]
    inputs = [routed(step, batch, case) for step, batch in zip(steps, batches, strict=True)]
    with precision(case):
        turns = [rotations(ids, config.rope_axes, theta=config.rope_theta, dtype=x.dtype) for x, _, ids, _ in inputs]
        conditionings = [model.conditioning_in(c) for *_, c in inputs]
        xs = [model.visual_in(x) for x, *_ in inputs]
        for block in model.blocks:
            for i, step in enumerate(steps):
                xs[i] = block(xs[i], conditionings[i], step.sequence_index, turns[i], attentions[i])
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


# ----------------------------------------------------------------------------------------------- the comparison


def local(x: Tensor) -> Tensor:
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


def grad_of(x: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient.detach()


def joined(parts: Sequence[Tensor], width: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows one after another, or all elements where there is no width."""
    if width is None:
        return torch.cat([torch.zeros(0, dtype=dtype), *(x.flatten().to(dtype) for x in parts)])
    return torch.cat([torch.zeros(0, width, dtype=dtype), *parts])


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
