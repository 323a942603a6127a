"""FSDP2 on gloo ranks, one of them without tokens: gradients equal the plain model's on all samples at once."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from launch import run_ranks
from model_cases import dit, error, largest_error, mmdit, run, samples
from torch.distributed.fsdp import MixedPrecisionPolicy

from knapformer.errors import ConfigurationError
from knapformer.losses import reduce_loss
from knapformer.parallel import checkpoint, shard

TEXT, VISUAL = [3, 0, 1, 4, 0, 2], [9, 12, 1, 0, 0, 17]
HOMES = {2: [[0, 1, 2, 3, 4, 5], []], 4: [[0, 1], [], [3], [2, 4, 5]]}
"""Samples of each rank; with four ranks, one has no token and one no visual token."""

MODELS = {"dit": dit, "mmdit": mmdit}
REDUCTIONS = ("rank_mean", "token_mean", "sample_mean")
CASES = {
    world_size: [
        (model, what, shard_size, reduction)
        for model, what, shard_size, reduction in product(
            MODELS, (None, "block", "attention"), (None, 2) if world_size == 4 else (None,), REDUCTIONS
        )
        if reduction == "token_mean" or (what is None and shard_size is None)
    ]
    for world_size in HOMES
}
"""Every reduction, and every way to shard and recompute, but not all of their combinations."""


def loss_of(model: torch.nn.Module, home: list[int], reduction: str, world_size: int) -> torch.Tensor:
    batch = samples(TEXT, VISUAL)
    weight = torch.cat([torch.zeros(0, 5, dtype=torch.float64), *(batch[i].weight for i in home)])
    per_token = (run(model, [batch[i] for i in home]) * weight).sum(dim=-1)
    return reduce_loss(
        per_token,
        reduction=reduction,
        lengths=[VISUAL[i] for i in home],
        num_tokens=sum(VISUAL),
        num_samples=len(VISUAL),
        world_size=world_size,
    )


def sharded_gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def in_bfloat16(rank: int, world_size: int) -> dict[str, Any]:
    """dtypes inside a model that FSDP2 runs in bfloat16."""
    model, dtypes = mmdit().float(), {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64)
    shard(model, mp_policy=policy)

    def note(_block, args):
        (tokens, *_), *_, (place, *_) = args
        dtypes["tokens"], dtypes["rotation"] = tokens.dtype, place.rotation.dtype

    model.blocks[0].register_forward_pre_hook(note)
    gradients = sharded_gradients(model, loss_of(model, HOMES[world_size][rank], "token_mean", world_size))
    return {"dtypes": dtypes, "gradients": gradients}


def train_all(rank: int, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for name, what, shard_size, reduction in CASES[world_size]:
        model = MODELS[name]()
        keys = list(model.state_dict())
        if what:
            checkpoint(model, what=what)
        shard(model, shard_size=shard_size)
        loss = loss_of(model, HOMES[world_size][rank], reduction, world_size)
        results[name, what, shard_size, reduction] = {
            "gradients": sharded_gradients(model, loss),
            "loss": loss.detach(),
            "same_keys": list(model.state_dict()) == keys,
            "num_local": sum(p.to_local().numel() for p in model.parameters()),
        }
    model = shard(dit())
    results["without the factor"] = sharded_gradients(model, loss_of(model, HOMES[world_size][rank], "token_mean", 1))
    results["bfloat16"] = in_bfloat16(rank, world_size)
    try:
        shard(dit(), shard_size=3)
    except ConfigurationError as refused:
        results["shard_size 3"] = str(refused)
    return results


@pytest.fixture(scope="module", params=HOMES)
def ranks(request):
    return run_ranks(train_all, request.param)


def plain(name: str, reduction: str, world_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Objective and gradients of the plain model: the ranks' losses, averaged in one process."""
    model = MODELS[name]()
    if reduction == "rank_mean":
        loss = torch.stack([loss_of(model, home, reduction, world_size) for home in HOMES[world_size]]).mean()
    else:
        loss = loss_of(model, list(range(len(VISUAL))), reduction, 1)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_gradients_equal_the_plain_models(ranks):
    world_size = len(ranks)
    references = {key: plain(*key, world_size) for key in product(MODELS, REDUCTIONS)}
    for case in CASES[world_size]:
        name, _, shard_size, reduction = case
        objective, gradients = references[name, reduction]
        found = [rank[case] for rank in ranks]
        assert error(torch.stack([f["loss"] for f in found]).mean(), objective) < 1e-12
        assert all(f["same_keys"] for f in found)
        assert max(f["num_local"] for f in found) < 1.3 * sum(g.numel() for g in gradients.values()) / (
            shard_size or world_size
        )
        for f in found:
            assert list(f["gradients"]) == list(gradients)
            assert largest_error(list(f["gradients"].values()), list(gradients.values())) < 1e-10, case


def test_the_comparison_notices_a_missing_factor(ranks):
    _, gradients = plain("dit", "token_mean", len(ranks))
    for rank in ranks:
        found = rank["without the factor"]
        assert min(map(error, found.values(), gradients.values())) > 0.4


def test_bfloat16_leaves_rotations_alone(ranks):
    _, gradients = plain("mmdit", "token_mean", len(ranks))
    for rank in ranks:
        assert rank["bfloat16"]["dtypes"] == {"tokens": torch.bfloat16, "rotation": torch.complex64}
        found = rank["bfloat16"]["gradients"]
        assert all(g.dtype == torch.float32 for g in found.values())
        assert (
            error(
                torch.cat([g.flatten() for g in found.values()]), torch.cat([g.flatten() for g in gradients.values()])
            )
            < 0.1
        )


def test_a_shard_size_that_does_not_divide(ranks):
    for rank in ranks:
        assert rank["shard_size 3"] == f"shard_size must divide the world size {len(ranks)}, got 3"
