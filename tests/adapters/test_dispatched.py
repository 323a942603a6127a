"""accelerate's dispatching loader, its default for iterable data sets, cuts lists of tensors: models refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

from family_cases import CASES, as_batch, balancer_of, draw, flux_sample, image_ids, one_size
from launch import run_ranks
from launchers import accelerator_of
from torch.utils.data import DataLoader, IterableDataset

from knapformer.adapters import balance
from knapformer.errors import KnapFormerError

SIDES = [(2, 2), (2, 3), (2, 4), (2, 5)]
"""Images of 4, 6, 8 and 10 tokens, two a batch."""


class Images(IterableDataset):
    def __init__(self, batched: bool = False) -> None:
        self.batched = batched

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i, (height, width) in enumerate(SIDES):
            size = {"hidden_states": draw(i, height * width, 4), "img_ids": image_ids(height, width)}
            yield flux_sample(0) if self.batched else flux_sample(i) | size


def listed(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {
        name: [sample[name] for sample in samples] for name in ("hidden_states", "img_ids", "encoder_hidden_states")
    }


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def drawn(batch: dict[str, Any]) -> dict[str, Any]:
    """What the loop itself draws for two samples."""
    return batch | {"timestep": [0.2, 0.4], "guidance": [3.5, 3.5], "pooled_projections": draw(9, 2, 6)}


def copied(batch: dict[str, list[Any]], *names: str) -> dict[str, list[Any]]:
    return {name: [x.clone() for x in values] if name in names else values for name, values in batch.items()}


def job(rank: int, _world_size: int) -> dict[str, Any]:
    from accelerate import DataLoaderConfiguration

    model = CASES["flux"].build()
    balance(model, balancer_of(model))

    def outcome(batch: dict[str, Any]) -> Any:
        try:
            output = model(**drawn(batch))
            return [len(x) for x in output.sample]
        except KnapFormerError as error:
            return f"{type(error).__name__}: {error}"

    found: dict[str, Any] = {}
    for name, data, collate, dispatches in (
        ("cut", Images(), listed, None),
        ("whole", Images(), listed, False),
        ("batched", Images(batched=True), stacked, None),
    ):
        accelerator = accelerator_of(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches))
        for batch in accelerator.prepare(DataLoader(data, batch_size=2, collate_fn=collate)):
            found[name] = outcome(batch)
            if name == "cut":
                found["rows"] = [len(x) for x in batch["hidden_states"]]
                found["noisy made in the loop"] = outcome(copied(batch, "hidden_states"))
                found["copies"] = outcome(copied(batch, *batch))
                rows = torch.cat([draw(rank, 4, 4), draw(2, 6, 4)])
                good = stacked([flux_sample(0)] * 2) | {"hidden_states": list(rows.split([4, 6]))}
                good["img_ids"] = [image_ids(*SIDES[0]), image_ids(*SIDES[1])]
                found["split in the loop"] = outcome(good)
    return found


def test_cut_samples_are_told() -> None:
    ranks = run_ranks(job, 2, timeout_s=90, preload=["accelerate", "knapformer.adapters.flux"])
    told = "RankError: rank 0: ConfigurationError: {} is {} of the {} rows of a tensor that accelerate's DataLoader"
    for own in ranks:
        assert own["rows"] == [6, 6], "of 4, 6, 8 and 10"
        assert own["cut"].startswith(told.format("hidden_states[0]", 6, 12)) and "dispatch_batches=False" in own["cut"]
        assert own["noisy made in the loop"].startswith(told.format("encoder_hidden_states[1]", 6, 10))
        assert own["copies"] == [6, 6], "the limit: nothing shows where copies come from"
        assert own["batched"] == [16, 16] and own["split in the loop"] == [4, 6]
    assert [own["whole"] for own in ranks] == [[4, 6], [8, 10]]


def test_without_such_a_loader_nothing_is_refused() -> None:
    """Views of longer tensors are everybody's right."""
    model = CASES["flux"].build()
    balance(model, balancer_of(model))
    with one_size():
        whole = as_batch(CASES["flux"], [0, 1], needs_grad=False)
    whole["hidden_states"] = [torch.cat([x, x])[: len(x)] for x in whole["hidden_states"]]
    whole["encoder_hidden_states"] = [torch.cat([x, x])[: len(x)] for x in whole["encoder_hidden_states"]]
    assert len(model(**whole).sample) == 2
