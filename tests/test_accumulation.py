"""Gradient accumulation over re-dealt micro-batches: the step's gradients are those of the micro-batches as loaded."""

from __future__ import annotations

import pytest
import torch
from balanced_cases import Case, build, relative, summed, unbalanced
from launch import run_ranks, try_ranks
from model_cases import pack, samples
from torch import Tensor

from knapformer import Balancer, CostModel, Step
from knapformer.errors import DisagreementError, RankError

CASE = Case("mmdit", planner="moldable", seed=3)
LOADED = {2: [[(5, 90), (3, 4)], [(2, 7)]], 3: [[(5, 90)], [], [(0, 30), (6, 31), (1, 1)]]}
"""Text and visual tokens of each rank's samples; each rank deals them to its micro-batches in turn."""


def accumulate(rank: int, world_size: int, num_micro_batches: int, drop: bool) -> dict[str, float]:
    """The largest relative error of each gradient; ``drop`` leaves out the last sample of a micro-step."""
    counts = [pair for row in LOADED[world_size] for pair in row]
    first = sum(map(len, LOADED[world_size][:rank]))
    mine = samples(*map(list, zip(*counts, strict=True)), seed=1)[first : first + len(LOADED[world_size][rank])]
    _, *expected = unbalanced(build(CASE), mine)
    for sample in mine:
        for tensor in vars(sample).values():
            tensor.grad = None
    model = build(CASE)
    balancer = Balancer(CostModel(hidden=24, num_heads=3, flops_per_s=1e9))
    batches = [mine[i::num_micro_batches] for i in range(num_micro_batches)]
    lengths = [{"text": [len(s.text) for s in batch], "visual": [len(s.visual) for s in batch]} for batch in batches]
    loaded = [sample for batch in batches for sample in batch]
    labels = torch.arange(len(loaded)) + 100 * rank
    ragged = [label % 3 for label in labels.tolist()]
    seen: list[int] = []
    for step, chosen in balancer.prepare_micro_batches(lengths, conditioning={"context": ragged}):
        seen += chosen
        check_context(step, labels[chosen])
        visual, text, position_ids, conditioning, _, _ = pack([loaded[i] for i in chosen])
        visual, text, conditioning = (
            x if x.requires_grad else x.double().requires_grad_() for x in (visual, text, conditioning)
        )
        y = model(
            step.route(visual, stream="visual"),
            step.route(text, stream="text"),
            step.route(position_ids),
            step.route_conditioning(conditioning),
            step.sequence_index,
            step.streams,
            attention=step.attention,
        )
        output = step.restore(y, stream="visual")
        weights = torch.cat([output.new_zeros(0, 5), *(loaded[i].weight for i in chosen)])
        if drop and rank == 0:
            weights = weights * 0
            drop = False
        (output * weights).sum().backward()
    assert sorted(seen) == list(range(len(mine)))
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    found = dict(zip([name for name, _ in model.named_parameters()], summed(gradients), strict=True))
    found |= {
        f"{kind} {i}": torch.zeros_like(x) if x.grad is None else x.grad
        for i, s in enumerate(mine)
        for kind, x in vars(s).items()
        if x.requires_grad
    }
    return {name: relative(x, y) for (name, x), y in zip(found.items(), expected, strict=True)}


def check_context(step: Step, labels: Tensor) -> None:
    """Ragged rows that say which sequence they belong to arrive with it, as many as it has."""
    local = step.route_conditioning(labels)
    assert step.conditioning_lengths("context") == [label % 3 for label in local.tolist()]
    rows = step.route_conditioning(labels.repeat_interleave(labels % 3), name="context")
    assert torch.equal(rows, local.repeat_interleave(local % 3))


def accumulate_all(rank: int, world_size: int) -> dict[int, dict[str, float]]:
    return {count: accumulate(rank, world_size, count, False) for count in (1, 2, 4)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_of_the_step_are_the_same(world_size: int) -> None:
    """Also with more micro-batches than a rank has samples, and on a rank without any in a micro-step."""
    for errors_of in run_ranks(accumulate_all, world_size):
        for count, errors in errors_of.items():
            assert max(errors.values()) <= 1e-10, f"{count} micro-batches"


def test_notices_a_micro_step_that_is_left_out() -> None:
    assert max(max(errors.values()) for errors in run_ranks(accumulate, 2, 2, True)) > 1e-3


def prepare_wrongly(rank: int, world_size: int, what: str) -> None:
    balancer = Balancer(CostModel(hidden=24, num_heads=3))
    if what == "count":
        balancer.prepare_micro_batches([[5]] * (1 + rank))
    else:
        balancer.prepare_micro_batches([[5], [6]], error=ValueError("disk full") if rank == 1 else None)


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("count", DisagreementError, "rank 1 has micro_batches 2, rank 0 has 1"),
        ("loader", RankError, "rank 1: ValueError: disk full"),
    ],
)
def test_a_bad_input_on_one_rank_is_raised_on_all(what: str, kind: type[Exception], message: str) -> None:
    for outcome in try_ranks(prepare_wrongly, 2, what):
        assert isinstance(outcome.error, kind) and message in str(outcome.error)
