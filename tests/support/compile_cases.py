"""Balanced models with compiled blocks, over steps of other lengths: values, gradients, and how often it compiled."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from balanced_cases import Case, compare_model, trained
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

STEPS = 10
WARM_UP = 2
"""Steps of which every one may compile."""


@dataclass(frozen=True)
class Compiled:
    """What a rank saw.

    Attributes:
        errors: the largest relative error of each step.
        graphs: compiled since the start, after each step.
        breaks: of graphs.
        num_runs: of graphs, recomputations among them.
        rows: packed rows of each step that a block was given.
    """

    errors: list[float]
    graphs: list[int]
    breaks: int
    num_runs: int
    rows: list[int]

    @property
    def recompiled(self) -> int:
        """Graphs that were compiled after the steps of ``WARM_UP``."""
        return self.graphs[-1] - self.graphs[WARM_UP - 1]


class CountingBackend(CompileCounterWithBackend):
    """Counts also how often graphs run."""

    num_runs = 0

    def __call__(self, gm: Any, example_inputs: Any) -> Any:
        compiled = super().__call__(gm, example_inputs)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return compiled(*args)

        return run


class Compiler:
    """Compiles, counts, and runs graphs and their derivatives without optimizing them."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.backend = CountingBackend("aot_eager")
        self.options: dict[str, Any] = {"backend": self.backend, "fullgraph": True, "dynamic": True}

    def __call__(self, modules: Any) -> None:
        for module in modules:
            module.compile(**self.options)

    @property
    def graphs(self) -> int:
        return int(self.backend.frame_count)

    @property
    def breaks(self) -> int:
        return sum(counters["graph_break"].values())


def compare_compiled(
    rank: int, world_size: int, cases: list[Case], *, whole: bool = False, any_rows: bool = True, num_steps: int = STEPS
) -> list[Compiled]:
    """Each case over steps of other samples and plans, with one model.

    Args:
        whole: compile the model, and not its blocks.
        any_rows: False is the negative control: graphs for 0 rows and for 1 are their own.
    """
    with contextlib.ExitStack() as stack:
        if not any_rows:
            stack.enter_context(
                mock.patch.multiple("knapformer.models.mmdit", any_number_of_rows=contextlib.nullcontext)
            )
            stack.enter_context(mock.patch.multiple("knapformer.models.dit", any_number_of_rows=contextlib.nullcontext))
        return [_compare(rank, world_size, case, whole, num_steps) for case in cases]


def _compare(rank: int, world_size: int, case: Case, whole: bool, num_steps: int) -> Compiled:
    compiler, model = Compiler(), trained(case)
    compiler([model] if whole else model.blocks)  # type: ignore[list-item]  # nn.Module knows no blocks
    rows = _rows_of(model)
    references: dict[Any, list[Tensor]] = {}
    errors, graphs = [], []
    for step in range(num_steps):
        found = compare_model(model, rank, world_size, replace(case, seed=case.seed + step), references)
        errors.append(max(found.values()))
        graphs.append(compiler.graphs)
    return Compiled(errors, graphs, compiler.breaks, compiler.backend.num_runs, rows)


def _rows_of(model: nn.Module) -> list[int]:
    """Grows with each call of the model by its packed rows."""
    rows: list[int] = []

    def note(_model: nn.Module, _args: Any, arguments: dict[str, Any]) -> None:
        rows.append(sum(lane.num_rows for lane in arguments["attention"].lanes))

    model.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    return rows


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


def compare_families(
    rank: int, _world_size: int, names: list[str], *, checkpoint: bool = False, fsdp: bool = False, lanes: int = 1
) -> dict[str, Compiled]:
    """diffusers' models with compiled blocks against the same models uncompiled, both balanced."""
    return {name: _compare_family(rank, name, checkpoint, fsdp, lanes) for name in names}


def _compare_family(rank: int, name: str, checkpoint: bool, fsdp: bool, lanes: int) -> Compiled:
    from family_cases import CASES

    plain = CASES[name].build()
    if checkpoint:
        plain.enable_gradient_checkpointing()
    compiled, compiler = copy.deepcopy(plain), Compiler()
    compile_blocks(compiled, compiler)
    for model in (plain, compiled):
        _balance(model, fsdp, lanes)
    errors, graphs = [], []
    for ids in FAMILY_STEPS:
        wanted, found = (_run_family(name, model, ids[rank]) for model in (plain, compiled))
        errors.append(max((_distance(x, y) for x, y in zip(found, wanted, strict=True)), default=0.0))
        graphs.append(compiler.graphs)
    return Compiled(errors, graphs, compiler.breaks, compiler.backend.num_runs, [])


def compile_blocks(model: Any, compiler: Compiler) -> None:
    """As diffusers does it; of SD3 it names no blocks."""
    if model._repeated_blocks:
        model.compile_repeated_blocks(**compiler.options)
    else:
        compiler(model.transformer_blocks)


def _balance(model: Any, fsdp: bool, lanes: int) -> None:
    from family_cases import balancer_of

    from knapformer.adapters import balance

    balancer = balancer_of(model)
    if lanes > 1:
        balancer = _in_lanes(balancer)
    balance(model, balancer)
    if fsdp:
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():  # not embedders: docs/diffusers.md says why
            if type(module).__name__ in (model._repeated_blocks or ()) and "TransformerBlock" in type(module).__name__:
                fully_shard(module)
        fully_shard(model)


def _in_lanes(balancer: Any) -> Any:
    """Every other sequence in the second lane."""
    inner = balancer.planner

    def plan(lengths: Any) -> Any:
        found = inner(lengths)
        return replace(found, lane=[i % 2 for i in range(found.num_sequences)])

    balancer.planner = plan
    return balancer


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
    return [*(out.detach() for out in output.sample), *inputs, *(getattr(p, "_local_tensor", p) for p in parameters)]


def _distance(found: Tensor, wanted: Tensor) -> float:
    norm = float(wanted.norm())
    return float((found - wanted).norm()) / (norm if norm > 1e-12 else 1.0)
