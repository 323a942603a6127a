"""The types of a plan file's parts; whether they make a plan is ``Plan``'s to say."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Whole = Annotated[int, Field(ge=-(2**62), le=2**62)]
"""What 64 bits hold: ``Plan`` names the bounds of each number beside its sequence."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class SegmentPart(_Part):
    """A rank's tokens."""

    rank: Whole
    start: Whole
    end: Whole


class TilePart(SegmentPart):
    """A rank's heads, and the rows of queries where those are not all."""

    queries: Annotated[list[Whole], Field(min_length=2, max_length=2)] | None = None


class SequencePart(_Part):
    """One sequence."""

    id: Whole
    length: Whole
    home: Whole
    tokens: list[SegmentPart]
    heads: list[TilePart]
    lane: Whole = 0


class PlanFile(_Part):
    """All of it, but for the schema's name."""

    world_size: Whole
    num_heads: Whole
    num_kv_heads: Whole | None = None
    planner: str = ""
    group_offset: Whole = 0
    max_tokens_per_rank: list[Whole] = []
    lanes: Whole = 1
    reason: str = ""
    sequences: list[SequencePart]
