"""Flow matching, and reductions of its loss that mean the same whatever a rank holds.

FSDP2 and DDP AVERAGE gradients over ranks: the objective that is optimised is ``(1 / N) · Σ_r loss_r``. A mean over all
ranks therefore needs the factor N on every rank:

    rank_mean    loss_r = (1 / T_r) · Σ_{i on r} l_i        objective (1 / N) · Σ_r (mean of rank r)
    token_mean   loss_r = (N / T) · Σ_{i on r} l_i          objective (1 / T) · Σ_i l_i
    sample_mean  loss_r = (N / S) · Σ_{s on r} m_s          objective (1 / S) · Σ_s m_s

with ``l_i`` the loss of token i, ``m_s`` the mean over the tokens of sample s, ``T_r`` the tokens at home on rank r,
and T and S the tokens and samples of ALL ranks. ``rank_mean`` is what a plain training loop computes: it weighs a token
by how few tokens share its rank. A mean over nothing is 0 and still has a graph, so that a rank without samples takes
part in backward. The average over ranks of the returned values is the objective itself.

With gradient accumulation T and S are those of all micro-batches of the optimizer's step, and the losses of the
micro-batches add up to the objective. Such a loss must not be divided by their number again. ``accelerator.backward``
(accelerate) and many trainers do divide: tell ``reduce_loss`` with ``backward_divides_by``. docs/losses.md has a table
of what is right where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.devices import to_device
from knapformer.given.lengths import Lengths

Reduction = Literal["rank_mean", "token_mean", "sample_mean"]


class Planned(Protocol):
    """What ``loss_counts`` reads of a ``knapformer.Step``: the lengths of all ranks of its balancing group."""

    lengths: Lengths


class LossCounts(TypedDict):
    """Of all ranks, as ``reduce_loss`` takes them by keyword."""

    num_tokens: int
    num_samples: int
    world_size: int


def flow_matching_pair(clean: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Noisy input and velocity target of rectified flow (arXiv 2209.03003; t = 1 is noise, as in arXiv 2403.03206).

    ``noisy = (1 - t) · clean + t · noise`` and ``target = noise - clean``.

    Args:
        clean: (T, C) tokens.
        noise: (T, C) standard normal.
        t: (T,) time of each token's sample, in [0, 1].

    Returns:
        noisy (T, C), target (T, C).

    Raises:
        ValueError: the shapes do not fit.
    """
    if clean.shape != noise.shape or t.shape != clean.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (clean, noise, t))
        raise ValueError(f"expected clean and noise (T, C) and t (T,), got {shapes}")
    return torch.lerp(clean, noise, t.unsqueeze(-1).to(clean.dtype)), noise - clean


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(T, C) and (T, C) to (T,): each token's mean squared error over channels, in float32 or higher."""
    if prediction.shape != target.shape:
        raise ValueError(f"expected equal shapes, got {tuple(prediction.shape)} and {tuple(target.shape)}")
    wide = torch.promote_types(prediction.dtype, torch.float32)
    return (prediction.to(wide) - target.to(wide)).square().mean(dim=-1)


def loss_counts(*steps: Planned, stream: str | None = None) -> LossCounts:
    """What a mean over all ranks is over: ``reduce_loss(…, reduction="token_mean", **loss_counts(step))``.

    Not a collective: every step knows the lengths of all ranks of its balancing group.

    Args:
        steps: of one optimizer step: one, or those of all its micro-batches.
        stream: the loss is on the tokens of this stream only, ``"visual"`` say.

    Returns:
        Loss tokens and samples of all ranks and all ``steps``, and the number of ranks.

    Raises:
        ConfigurationError: no step, no such stream, steps of groups of different sizes, or the balancing group is not
            all of torch.distributed's ranks: other groups' tokens are not known, and FSDP and DDP average over all.
    """
    sizes = {step.lengths.num_ranks for step in steps}
    if len(sizes) != 1:
        raise ConfigurationError(f"expected steps of one balancing group, got {len(steps)}, of {sorted(sizes)} ranks")
    (num_ranks,) = sizes
    if dist.is_initialized() and dist.get_world_size() != num_ranks:
        raise ConfigurationError(
            f"the balancing group has {num_ranks} of {dist.get_world_size()} ranks, and no step knows the others' "
            "tokens: add up num_tokens and num_samples of all groups, and give reduce_loss as world_size the number of "
            "ranks over which gradients are averaged"
        )
    num_tokens = sum(_loss_tokens(step.lengths, stream) for step in steps)
    return {
        "num_tokens": num_tokens,
        "num_samples": sum(step.lengths.num_sequences for step in steps),
        "world_size": num_ranks,
    }


def _loss_tokens(lengths: Lengths, stream: str | None) -> int:
    if stream is None:
        return lengths.num_tokens
    streams = dict(lengths.streams)
    if stream not in streams:
        raise ConfigurationError(f"there is no stream {stream!r}; the lengths have {list(streams)}")
    return int(streams[stream].sum())


def reduce_loss(
    per_token_loss: Tensor,
    *,
    reduction: Reduction,
    lengths: Sequence[int] | None = None,
    num_tokens: int | None = None,
    num_samples: int | None = None,
    world_size: int | None = None,
    backward_divides_by: int = 1,
) -> Tensor:
    """This rank's loss, to call ``backward`` on; see the module's docstring for the objective that results.

    The losses are those of this rank's own samples, in their order at home: of what ``Step.restore`` gave, not of the
    packed rows of a step, which are another rank's as well.

    Args:
        per_token_loss: (T_home,) losses of the tokens at home on this rank, sample after sample.
        reduction: ``"rank_mean"``, ``"token_mean"`` or ``"sample_mean"``.
        lengths: ``sample_mean``: loss tokens of each sample at home (visual tokens for an MMDiT). A sample of length 0
            adds 0.
        num_tokens: ``token_mean``: loss tokens of all ranks (and micro-batches) of the step.
        num_samples: ``sample_mean``: samples of all ranks (and micro-batches) of the step.
        world_size: the number of ranks over which gradients are averaged; not needed for ``rank_mean``.
        backward_divides_by: by what whoever calls ``backward`` divides the loss:
            ``accelerator.gradient_accumulation_steps`` for ``accelerator.backward``, 1 for ``loss.backward()``.
            ``token_mean`` and ``sample_mean`` have divided by the counts of all micro-batches already, and are
            multiplied by it. ``rank_mean`` is not: divided, it is the mean over the micro-batches.

    Returns:
        A scalar with a graph, even where there is no token, in float32 or higher. A mean over nothing is 0.

    Raises:
        ConfigurationError: an unknown reduction, a count that it needs is missing or below this rank's own, or
            ``backward_divides_by`` is no integer of at least 1.
        LengthsError: the lengths do not sum to T_home.
    """
    if reduction not in get_args(Reduction):
        raise ConfigurationError(f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}")
    if per_token_loss.dim() != 1:
        raise ValueError(f"per_token_loss must have shape (T,), got {tuple(per_token_loss.shape)}")
    factor = _count("backward_divides_by", backward_divides_by, reduction, minimum=1)
    num_home_tokens = per_token_loss.shape[0]
    per_token_loss = per_token_loss.to(torch.promote_types(per_token_loss.dtype, torch.float32))
    if reduction == "rank_mean":
        return per_token_loss.sum() / max(num_home_tokens, 1)
    num_ranks = _count("world_size", world_size, reduction, minimum=1)
    if reduction == "token_mean":
        count = _count("num_tokens", num_tokens, reduction, minimum=num_home_tokens)
        return per_token_loss.sum() * (factor * num_ranks / max(count, 1))
    if lengths is None:
        raise ConfigurationError("sample_mean needs lengths, got None")
    count = _count("num_samples", num_samples, reduction, minimum=len(lengths))
    return (per_token_loss * _token_weights(lengths, per_token_loss)).sum() * (factor * num_ranks / max(count, 1))


def _token_weights(lengths: Sequence[int], like: Tensor) -> Tensor:
    """(T,) one over the length of each token's sample; built on the host, so that the device is not waited for."""
    if sum(lengths) != like.shape[0]:
        raise LengthsError(f"the lengths sum to {sum(lengths)} tokens, got {like.shape[0]} losses")
    counts = torch.tensor(lengths, dtype=torch.int64)
    weights = torch.repeat_interleave(1.0 / counts.clamp(min=1).to(torch.float64), counts)
    return to_device(weights.to(like.dtype), like.device)


def _count(name: str, value: int | None, reduction: str, *, minimum: int) -> int:
    if value is None or isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{reduction} needs {name}, an integer of at least {minimum}, got {value!r}")
    return value
