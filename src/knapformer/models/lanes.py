"""Lanes of packed tokens: each block takes all of them, and computes one while another waits for an exchange.

A block's arithmetic is written as what comes before attention and what comes after it; ``in_turns`` runs both for every
lane, and attention in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from knapformer.execution.turns import Turns, take_turns
from knapformer.models.layers import Attention
from knapformer.models.rope import rotate

T = TypeVar("T")


class Place(Protocol):
    """Where a lane's tokens are.

    Attributes:
        rotation: (T, D/2).
        attention: among the lane's tokens.
    """

    rotation: Tensor
    attention: Any


class Projected(NamedTuple):
    """What a lane brings to attention: q (T, H, D), k and v (T, Hkv, D), and what it needs afterwards."""

    q: Tensor
    k: Tensor
    v: Tensor
    kept: Any = None


def lanes_of(attention: Attention, num_rows: int) -> tuple[list[Any], list[int]]:
    """The attention of each lane, and its packed rows: one lane unless ``attention`` has several."""
    lanes = list(getattr(attention, "lanes", ()))
    if len(lanes) < 2:
        return [attention], [num_rows]
    return lanes, [lane.num_rows for lane in lanes]


def in_turns(
    places: Sequence[Any],
    before: Callable[[int], Projected],
    after: Callable[[int, Tensor, Any], T],
) -> list[T]:
    """Each lane through attention; where there are several, one computes while another waits for its exchange.

    Args:
        places: one ``Place`` of each lane.
        before: from a lane's position to what it brings.
        after: from a lane's position, what was attended to, (T, H·D), and what was kept, to the lane's result.
    """
    if len(places) == 1:
        q, k, v, kept = before(0)
        (place,) = places
        attended = place.attention(rotate(q, place.rotation), rotate(k, place.rotation), v)
        return [after(0, attended.flatten(1), kept)]

    if torch.compiler.is_compiling():
        projected = [before(i) for i in range(len(places))]
        rotated = [
            (rotate(own.q, place.rotation), rotate(own.k, place.rotation), own.v)
            for own, place in zip(projected, places, strict=True)
        ]
        attended = places[0].attention.together(rotated)
        return [after(i, attended[i].flatten(1), own.kept) for i, own in enumerate(projected)]

    def lane(i: int) -> Turns[T]:
        q, k, v, kept = before(i)
        rotation = places[i].rotation
        attended = yield from places[i].attention.turns(rotate(q, rotation), rotate(k, rotation), v)
        return after(i, attended.flatten(1), kept)

    return take_turns([lane(i) for i in range(len(places))])


def cut(x: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """The rows of each lane; copies, because FSDP2 warns of a block that gives back a view."""
    return tuple(part.clone() for part in x.split(list(counts))) if len(counts) > 1 else (x,)


def join(lanes: Sequence[Tensor]) -> Tensor:
    """The rows of all lanes, one lane after another."""
    return torch.cat(list(lanes)) if len(lanes) > 1 else lanes[0]
