"""The unbalanced run of a soak case: its models and samples, and every sample alone."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from balanced_cases import summed
from model_cases import Sample, samples
from soak_cases import Rows, SoakCase
from torch import Tensor, nn

from knapformer.models import DiT, DiTConfig, MMDiT, MMDiTConfig, StreamIndex, dit, layers, local_attention, mmdit

DTYPES = {"autocast": torch.float32} | {
    name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")
}
INPUTS = ("text", "visual", "conditioning", "context")
WIDTHS = {"text": 7, "visual": 5, "conditioning": 6, "context": 6}
AXES = {6: (2, 2, 2), 8: (4, 2, 2), 10: (4, 4, 2), 16: (4, 6, 6), 32: (8, 12, 12)}


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


def grad_of(x: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(x) if gradient is None else gradient.detach()


def joined(parts: Sequence[Tensor], width: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows one after another, or all elements where there is no width."""
    if width is None:
        return torch.cat([torch.zeros(0, dtype=dtype), *(x.flatten().to(dtype) for x in parts)])
    return torch.cat([torch.zeros(0, width, dtype=dtype), *parts])
