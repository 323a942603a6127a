"""Lengths of all ranks: streams of one order, and who holds what."""

from __future__ import annotations

import pytest

from knapformer.errors import LengthsError
from knapformer.given.lengths import Lengths


def test_streams_come_in_the_same_order_on_all_ranks():
    one, other = {"text": [1], "visual": [20]}, {"visual": [30], "text": [2]}
    assert Lengths.from_ranks([one, one]).stream_starts().tolist() == [[0, 0], [1, 1], [21, 21]]
    with pytest.raises(LengthsError, match=r"rank 1: its streams are \['visual', 'text'\], rank 0 has \['text', 'v"):
        Lengths.from_ranks([one, other])
    with pytest.raises(LengthsError, match=r"rank 1: its streams are \[''\], rank 0 has \['text', 'visual'\]"):
        Lengths.from_ranks([one, [3]])
