"""What a sampler's ``state_dict`` holds, checked where it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field

from knapformer.errors import ConfigurationError
from knapformer.given.files import checked_object
from knapformer.workloads.arrangement import Arrangement
from knapformer.workloads.sampling import Done

SCHEMA = "knapformer.sampler/1"

MOST_SEED = 2**63 - 1
MOST_ARRANGEMENTS = 1000

Count = Annotated[int, Field(strict=True, ge=0, le=MOST_SEED)]


class SamplerState(BaseModel):
    """All of it but the schema's name."""

    seed: Count
    shuffle: Annotated[bool, Field(strict=True)]
    epoch: Count
    lengths: Annotated[str, Field(strict=True)]
    done: Annotated[list[tuple[dict[str, Any], Count]], Field(max_length=MOST_ARRANGEMENTS)]

    @property
    def arrangements(self) -> Done:
        """What is done: how steps were arranged, and how many.

        Raises:
            ConfigurationError: an arrangement is none.
        """
        return tuple((Arrangement.from_dict(content), num_steps) for content, num_steps in self.done)


def read_state(state: Any) -> SamplerState:
    """The state, checked.

    Raises:
        ConfigurationError: it is none, naming the place.
    """
    if not isinstance(state, Mapping) or state.get("schema") != SCHEMA:
        raise ConfigurationError(f"expected the state of a sampler, {SCHEMA}, got {state!r:.200}")
    return checked_object(SamplerState, dict(state), "the state of a sampler")
