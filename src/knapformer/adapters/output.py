"""What a balanced transformer returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.utils import BaseOutput


@dataclass
class BalancedOutput(BaseOutput):  # type: ignore[misc]  # diffusers is not typed
    """Like ``Transformer2DModelOutput``, also for a list of samples.

    diffusers registers the class with pytree, so that FSDP2 finds the tensors in it.

    Attributes:
        sample: in diffusers' own layout; of a call with a list, per-sample tensors without the batch dimension.
        rows: (T_home, C) the same values as packed rows; ``rows.sum() * 0`` is a loss for a rank without samples.
    """

    sample: Any = None
    rows: Any = None
