"""Balanced models with compiled blocks, over steps of other lengths: values, gradients, and how often it compiled."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from balanced_cases import Case, compare_model, trained
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

STEPS = 10
WARM_UP = 2


@dataclass(frozen=True)
class Compiled:
    """What a rank saw.

    Attributes:
        errors: the largest relative error of each step.
        graphs: compiled since the start, after each step.
        breaks: of graphs.
    """

    errors: list[float]
    graphs: list[int]
    breaks: int


class Counter:
    """A backend of ``torch.compile`` that counts, and runs graphs and their derivatives without optimizing them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.backend = CompileCounterWithBackend("aot_eager")

    def compile(self, blocks: Any) -> None:
        for block in blocks:
            block.compile(backend=self.backend, fullgraph=True, dynamic=True)

    @property
    def graphs(self) -> int:
        return int(self.backend.frame_count)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())


def compare_compiled(rank: int, world_size: int, cases: list[Case]) -> list[Compiled]:
    """Each case over steps of other samples and plans, with one model."""
    return [_compare(rank, world_size, case) for case in cases]


def _compare(rank: int, world_size: int, case: Case) -> Compiled:
    counter, model = Counter(), trained(case)
    counter.compile(_blocks(model))
    references: dict[Any, list[Tensor]] = {}
    errors, graphs = [], []
    for step in range(STEPS):
        found = compare_model(model, rank, world_size, replace(case, seed=case.seed + step), references)
        errors.append(max(found.values()))
        graphs.append(counter.graphs)
    return Compiled(errors, graphs, counter.breaks)


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.blocks)


FAMILY_STEPS = [
    ([0, 1, 2, 3], [4, 5]),
    ([0, 1, 2, 3, 4, 5], []),
    ([5], [2]),
    ([], [1, 3]),
    ([2], []),
    ([4, 1, 0], [2, 5, 3]),
    ([3, 5], [0]),
    ([], [2]),
]
"""Samples of two ranks in each step; sample 2 has one visual token and one of text."""


def compare_families(rank: int, _world_size: int, names: list[str], checkpoint: bool = False) -> dict[str, Compiled]:
    """diffusers' models with compiled blocks against the same models uncompiled, both balanced."""
    return {name: _compare_family(rank, name, checkpoint) for name in names}


def _compare_family(rank: int, name: str, checkpoint: bool) -> Compiled:
    from family_cases import CASES, balancer_of

    from knapformer.adapters import balance

    plain = CASES[name].build()
    if checkpoint:
        plain.enable_gradient_checkpointing()
    balance(plain, balancer_of(plain))
    compiled, counter = copy.deepcopy(plain), Counter()
    if compiled._repeated_blocks:
        compiled.compile_repeated_blocks(backend=counter.backend, fullgraph=True, dynamic=True)
    else:
        counter.compile(compiled.transformer_blocks)
    errors, graphs = [], []
    for ids in FAMILY_STEPS:
        wanted, found = (_run_family(name, model, ids[rank]) for model in (plain, compiled))
        errors.append(max((_distance(x, y) for x, y in zip(found, wanted, strict=True)), default=0.0))
        graphs.append(counter.graphs)
    return Compiled(errors, graphs, counter.breaks)


def _run_family(name: str, model: Any, ids: list[int]) -> list[Tensor]:
    """Outputs, gradients of the inputs and of this rank's parameters."""
    from family_cases import CASES, loss_weights, stacked

    model.zero_grad()
    batch, arguments = stacked(CASES[name], ids, True)
    output = model(**arguments)
    parts = [(out * loss_weights(i, out)).sum() for i, out in zip(ids, output.sample, strict=True)]
    sum(parts, output.rows.sum() * 0).backward()
    inputs = [sample[key].grad for sample in batch for key in CASES[name].needs_grad]
    parameters = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return [*(out.detach() for out in output.sample), *inputs, *parameters]


def _distance(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / (norm if norm > 1e-12 else 1.0)
