"""Loops over loaders of unequal length on three gloo ranks, by launcher and with prefetch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from launchers import accelerator_of
from loss_cases import balancer_of, everything, forward, gradients, lengths_of, small
from model_cases import Sample
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from knapformer import Balancer, Step
from knapformer.errors import KnapFormerError
from knapformer.losses import loss_counts, reduce_loss, squared_error
from knapformer.parallel import shard

NUM_RANKS = 3
LOADED = [[[0, 1], [2], [5]], [], [[3, 4]]]
"""Samples of each batch of each rank."""
STEPS = [[0, 1, 3, 4], [2], [5]]
DEALT = 4
"""Samples that accelerate deals out one by one, so that the first rank has two batches, and accumulates over two."""


class Fails:
    """A loader that raises after its batches."""

    def __init__(self, batches: list[Any], fails: bool) -> None:
        self.batches, self.fails = batches, fails

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches
        if self.fails:
            raise OSError("no file")


def samples_of(ids: list[int]) -> list[Sample]:
    return [everything()[i] for i in ids]


def lengths_of_ids(ids: list[int]) -> dict[str, list[int]]:
    return lengths_of(samples_of(ids))


def backward(model: nn.Module, step: Step, ids: list[int], call: Any = Tensor.backward, **options: Any) -> None:
    y, target = forward(model, step, samples_of(ids))
    errors = squared_error(step.restore(y, stream="visual"), target)
    call(reduce_loss(errors, reduction="token_mean", **{**loss_counts(step, stream="visual"), **options}))


def one_process(ids: list[int]) -> dict[str, Tensor]:
    """Gradients of the mean over the tokens of these samples."""
    model = small()
    balancer = balancer_of("home")
    step = balancer.prepare(lengths_of_ids(ids))
    backward(model, step, ids)
    return gradients(model)


def all_loops(rank: int, _world_size: int) -> dict[str, Any]:
    balancer, found = balancer_of("anything"), {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": shard}.items():
        found[name] = joined(wrap(small()), balancer, LOADED[rank])
    found["prefetched"] = prefetched(balancer, LOADED[rank])
    found["accelerate"] = accelerated(balancer)
    found["first end"] = list(balancer.join([[0]] * (3 - rank)))
    found["first end, prefetched"] = [b for b, _ in balancer.prefetch([[0]] * (3 - rank), lengths_of_ids)]
    found["errors"] = {name: caught(loop, balancer, rank) for name, loop in WRONG.items()}
    return found


def joined(model: nn.Module, balancer: Balancer, loader: Any) -> list[dict[str, Tensor]]:
    """Gradients of each step."""
    found = []
    for ids in balancer.join(loader, empty=list):
        step = balancer.prepare(lengths_of_ids(ids))
        backward(model, step, ids)
        found.append(gradients(model))
        model.zero_grad()
    return found


def prefetched(balancer: Balancer, loader: Any) -> list[dict[str, Tensor]]:
    model, found = DistributedDataParallel(small()), []
    for ids, step in balancer.prefetch(loader, lengths_of_ids, empty=list):
        backward(model, step, ids)
        found.append(gradients(model))
        model.zero_grad()
    return found


def accelerated(balancer: Balancer, sync_with_dataloader: bool = False) -> list[dict[str, Tensor]]:
    """A loader that accelerate has cut for the ranks, with accumulation over the whole of it."""
    from accelerate import DataLoaderConfiguration
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = accelerator_of(
        gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_with_dataloader=sync_with_dataloader),
        dataloader_config=DataLoaderConfiguration(even_batches=False),
    )
    model, loader = accelerator.prepare(small(), DataLoader(range(DEALT), batch_size=1, collate_fn=list))
    assert len(loader) == (2 if accelerator.process_index == 0 else 1)
    num_tokens = sum(lengths_of_ids(list(range(DEALT)))["visual"])
    for ids in balancer.join(loader, empty=list):
        with accelerator.accumulate(model):
            step = balancer.prepare(lengths_of_ids(ids))
            backward(model, step, ids, accelerator.backward, num_tokens=num_tokens, backward_divides_by=2)
    assert accelerator.sync_gradients
    return [gradients(model)]


def other_call(balancer: Balancer, rank: int) -> None:
    if rank == 1:
        balancer.prepare([3])
    else:
        list(balancer.join([[0]], empty=list))


def raising(rank: int) -> list[int]:
    raise ValueError(f"no empty batch on {rank}")


WRONG: dict[str, Callable[[Balancer, int], Any]] = {
    "loader": lambda balancer, rank: list(balancer.join(Fails([[0], [1]], rank == 1), empty=list)),
    "loader of a rank that is longer": lambda balancer, rank: list(
        balancer.join(Fails([[0]] * (1 + rank), rank == 2), empty=list)
    ),
    "empty": lambda balancer, rank: list(balancer.join([[0]] * rank, empty=lambda: raising(rank))),
    "empty, prefetched": lambda balancer, rank: list(
        balancer.prefetch([[0]] * rank, lengths_of_ids, empty=lambda: raising(rank))
    ),
    "empty on some": lambda balancer, rank: list(balancer.join([[0]], empty=list if rank else None)),
    "other call": other_call,
}


def caught(loop: Callable[[Balancer, int], Any], balancer: Balancer, rank: int) -> str:
    try:
        loop(balancer, rank)
        return "end"
    except KnapFormerError as error:
        return f"{type(error).__name__}: {error}"
