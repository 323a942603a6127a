"""How steps are made of samples: what a rank may take of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How steps are made of the samples that are left.

    Attributes:
        num_ranks: that load samples.
        samples_per_rank: in a batch, where no cap closes it earlier.
        tokens_per_rank: at most, in a batch of more than one sample; one of the two is given.
        max_tokens_per_rank: cap on the tokens of a batch.
        max_work_per_rank_s: cap on the work of a batch of more than one sample, in seconds of one layer's forward pass.
        balance: the free mix. Caps are then those of a rank's share of the step.
        cost: what lengths cost.

    Raises:
        ConfigurationError: a value is none of its kind.
    """

    num_ranks: int
    samples_per_rank: int | None = None
    tokens_per_rank: int | None = None
    max_tokens_per_rank: int | None = None
    max_work_per_rank_s: float | None = None
    balance: bool = False
    cost: CostModel = field(default_factory=CostModel)

    def __post_init__(self) -> None:
        for name in ("num_ranks", "samples_per_rank", "tokens_per_rank", "max_tokens_per_rank"):
            value = getattr(self, name)
            if value is None and name != "num_ranks":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ConfigurationError(f"{name} must be an integer of at least 1, got {value!r}")
            object.__setattr__(self, name, int(value))
        if (self.samples_per_rank is None) == (self.tokens_per_rank is None):
            raise ConfigurationError(
                "give samples_per_rank or tokens_per_rank, one of them, "
                f"got {self.samples_per_rank!r} and {self.tokens_per_rank!r}"
            )
        work = self.max_work_per_rank_s
        if work is not None and (isinstance(work, bool) or not isinstance(work, int | float) or not work > 0):
            raise ConfigurationError(f"max_work_per_rank_s must be a number above 0, got {work!r}")
        if not isinstance(self.balance, bool) or not isinstance(self.cost, CostModel):
            raise ConfigurationError(
                f"needs balance True or False and a CostModel, got {self.balance!r}, {self.cost!r}"
            )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Arrangement:
        """Of ``to_dict``'s content.

        Raises:
            ConfigurationError: it is not.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(content, Mapping) or set(content) != names:
            raise ConfigurationError(f"an arrangement has the keys {sorted(names)}, got {content!r}")
        return cls(**{**content, "cost": CostModel.from_dict(content["cost"])})

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)

    @property
    def most_tokens(self) -> int | None:
        """Tokens of a batch of more than one sample."""
        limits = [limit for limit in (self.tokens_per_rank, self.max_tokens_per_rank) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class Room:
    """What each of so many ranks may take; tokens and work hold for more than one sample."""

    num_ranks: int
    samples: int
    tokens: int | None
    work_s: float | None

    def holds(self, num_samples: int, num_tokens: int, work_s: float) -> bool:
        if num_samples == 1:
            return True
        return (
            num_samples <= self.samples
            and (self.tokens is None or num_tokens <= self.tokens)
            and (self.work_s is None or work_s <= self.work_s)
        )
