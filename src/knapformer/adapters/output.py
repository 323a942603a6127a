"""What a balanced transformer returns, and the loss of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.given.lengths import Lengths
from knapformer.training.losses import Planned, Reduction, loss_counts, reduce_loss


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Whose tokens an output has. No tensor, so that wrappers which look into outputs leave it as it is.

    Attributes:
        lengths: of the step, of all ranks.
        stream: whose tokens the rows are; None for all.
    """

    lengths: Lengths
    stream: str | None


@dataclass
class BalancedOutput(BaseOutput):  # type: ignore[misc]  # diffusers is not typed
    """Like ``Transformer2DModelOutput``, also for a list of samples.

    diffusers registers the class with pytree, so that FSDP2 finds the tensors in it.

    Attributes:
        sample: in diffusers' own layout; of a call with a list, per-sample tensors without the batch dimension.
        rows: (T_home, C) the same values as packed rows; ``rows.sum() * 0`` is a loss for a rank without samples.
        counted: which tokens of all ranks a mean over them counts.
    """

    sample: Any = None
    rows: Any = None
    counted: Any = None

    def loss(
        self,
        target: Tensor | Sequence[Tensor],
        *,
        reduction: Reduction,
        weights: Any = None,
        elementwise: Callable[[Tensor, Tensor], Tensor] | None = None,
        steps: Sequence[Planned] = (),
        backward_divides_by: int = 1,
    ) -> Tensor:
        """This rank's loss, to call ``backward`` on; 0 with a graph where this rank has no sample. Not a collective.

        Args:
            target: shaped like ``sample``: a batch, or a list of per-sample tensors.
            reduction: the mean; see ``knapformer.losses``. A token's loss is the mean over its elements.
            weights: a factor for each sample of this rank, such as (B, 1, 1) or (B,), or a list of numbers.
            elementwise: a prediction and a target in float32 or higher to losses of the same shape; by default the
                squared difference.
            steps: of all micro-batches, where gradients are accumulated; see ``knapformer.losses.loss_counts``. By
                default the means are over this step.
            backward_divides_by: see ``knapformer.losses.reduce_loss``.

        Returns:
            A scalar, in float32 or higher. Its average over ranks is the mean over all of them.

        Raises:
            LengthsError: the target has other samples or shapes than ``sample``, or there are not as many weights.
            ConfigurationError: as ``loss_counts`` and ``reduce_loss``.
        """
        parts = _errors(self.sample, target, elementwise or _squared_difference)
        if weights is not None:
            parts = [own * factor for own, factor in zip(parts, _factors(weights, parts), strict=True)]
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        flat = torch.cat([self.rows[:0].flatten().to(wide), *(own.flatten() for own in parts)])
        if reduction == "rank_mean":
            return reduce_loss(flat, reduction=reduction, backward_divides_by=backward_divides_by)
        counts = loss_counts(*(steps or [self.counted]), stream=self.counted.stream)
        counts["num_tokens"] *= self.rows.shape[1]  # elements, as many for each token
        return reduce_loss(
            flat,
            reduction=reduction,
            lengths=[own.numel() for own in parts],
            backward_divides_by=backward_divides_by,
            **counts,
        )


def _errors(sample: Any, target: Any, elementwise: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Of each sample, in its shape, in float32 or higher."""
    if len(sample) != len(target):
        raise LengthsError(f"this rank has {len(sample)} samples, the target {len(target)}")
    found = []
    for i, (prediction, wanted) in enumerate(zip(sample, target, strict=True)):
        if prediction.shape != wanted.shape:
            shapes = f"{tuple(wanted.shape)}, expected {tuple(prediction.shape)}"
            raise LengthsError(f"target[{i}] has shape {shapes} as sample[{i}]")
        wide = torch.promote_types(torch.promote_types(prediction.dtype, wanted.dtype), torch.float32)
        losses = elementwise(prediction.to(wide), wanted.to(wide))
        if losses.shape != prediction.shape:
            raise ConfigurationError(
                f"elementwise must keep the shape {tuple(prediction.shape)}, got {tuple(losses.shape)}; "
                'give torch\'s losses reduction="none"'
            )
        found.append(losses)
    return found


def _squared_difference(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square()


def _factors(weights: Any, parts: Sequence[Tensor]) -> list[Any]:
    factors = list(weights.reshape(-1) if isinstance(weights, Tensor) else weights)
    if len(factors) != len(parts):
        raise LengthsError(f"this rank has {len(parts)} samples, and {len(factors)} weights")
    return factors
