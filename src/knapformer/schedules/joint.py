"""Several tensors that travel together: where their units lie in the one buffer of an exchange.

The buffer has three regions: what leaves, by destination; what stays; what arrives, by source. For each peer the units
of the first tensor come first, then those of the second, and so on. Packing fills the first two regions, unpacking
reads the last two; the reversed exchange fills the last two and reads the first two, and needs no other indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knapformer.schedules.tokens import Blocks, Exchange, IntArray, starts_of


@dataclass(frozen=True, slots=True, eq=False)
class JointExchange:
    """One rank's part in one all-to-all of several tensors of one width.

    Attributes:
        taken: units of the inputs, one input after another, in the order of the first two regions.
        given: units of the outputs, one output after another, in the order of the last two regions.
        peers: (P,) ranks that this one exchanges something with, ascending.
        send_counts, receive_counts: (P,) units to and from each of them.
        num_kept: units of the middle region.
        lower: how many units of the first region go to lower ranks, and of the last come from lower ones; for sums are
            made in order of rank, this one in its place.
        nums_in, nums_out: units of each input and output.
        is_local, has_copies: see ``Exchange``, of any of the tensors.
    """

    taken: Blocks
    given: Blocks
    peers: IntArray
    send_counts: IntArray
    receive_counts: IntArray
    num_kept: int
    lower: tuple[int, int]
    nums_in: tuple[int, ...]
    nums_out: tuple[int, ...]
    is_local: bool
    has_copies: bool

    @classmethod
    def of(cls, exchanges: Sequence[Exchange]) -> JointExchange:
        """The exchanges of the tensors, in the order of the tensors; all of one rank, and none that adds up."""
        rank = exchanges[0].rank
        peers = exchanges[0].peers if len(exchanges) == 1 else np.unique(np.concatenate([e.peers for e in exchanges]))
        nums_in, nums_out = [e.num_in for e in exchanges], [e.num_out for e in exchanges]
        sent = _ordered([(e.send, e.destination) for e in exchanges], nums_in)
        received = _ordered([(e.receive, e.source) for e in exchanges], nums_out)
        kept_from = _ordered([(e.keep_from, None) for e in exchanges], nums_in)
        kept_to = _ordered([(e.keep_to, None) for e in exchanges], nums_out)
        send_counts = np.sum([_at(peers, e.peers, e.send_counts) for e in exchanges], axis=0)
        receive_counts = np.sum([_at(peers, e.peers, e.receive_counts) for e in exchanges], axis=0)
        below = peers < rank
        return cls(
            taken=sent.followed_by(kept_from),
            given=kept_to.followed_by(received),
            peers=peers,
            send_counts=send_counts,
            receive_counts=receive_counts,
            num_kept=kept_from.num_units,
            lower=(int(send_counts[below].sum()), int(receive_counts[below].sum())),
            nums_in=tuple(nums_in),
            nums_out=tuple(nums_out),
            is_local=all(e.is_local for e in exchanges),
            has_copies=any(e.has_copies for e in exchanges),
        )


def _ordered(parts: Sequence[tuple[Blocks, IntArray | None]], counts: Sequence[int]) -> Blocks:
    """Blocks of all tensors, as units of the tensors one after another; by rank where one is given."""
    shifts = starts_of(np.asarray(counts, np.int64)).tolist()
    blocks = Blocks.joined([part.moved(shift) for (part, _), shift in zip(parts, shifts, strict=True)])
    if len(parts) == 1 or parts[0][1] is None:
        return blocks
    return blocks.take(np.argsort(np.concatenate([rank for _, rank in parts if rank is not None]), kind="stable"))


def _at(peers: IntArray, own: IntArray, counts: IntArray) -> IntArray:
    """(P,) counts for some of the peers, 0 for the others."""
    spread = np.zeros(len(peers), np.int64)
    spread[np.searchsorted(peers, own)] = counts
    return spread
