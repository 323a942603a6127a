"""Merging and splitting streams are inverse, and keep packed order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.models import StreamIndex


@given(st.lists(st.booleans(), max_size=40))
def test_merge_and_split_are_inverse(ids):
    streams = StreamIndex.from_stream_ids(np.asarray(ids, bool))
    x = torch.arange(2 * len(ids)).reshape(len(ids), 2)
    text, visual = streams.split(x)
    assert torch.equal(streams.merge(text, visual), x)
    assert torch.equal(torch.cat(streams.split(streams.merge(text, visual))), torch.cat([text, visual]))
    assert text[:, 0].tolist() == [2 * i for i, is_visual in enumerate(ids) if not is_visual]
    assert visual[:, 0].tolist() == [2 * i for i, is_visual in enumerate(ids) if is_visual]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_lengths_put_text_first_in_each_sequence(lengths):
    text, visual = [n for n, _ in lengths], [n for _, n in lengths]
    ids = [i for num_text, num_visual in lengths for i in [0] * num_text + [1] * num_visual]
    expected = StreamIndex.from_stream_ids(ids)
    *found, runs = StreamIndex.from_lengths(text, visual)
    assert all(map(torch.equal, found, expected))
    assert all(rows.dtype == torch.int64 for rows in expected[:3])
    assert runs == expected.runs and sum(runs[0::2]) == sum(text) and sum(runs[1::2]) == sum(visual)


def test_a_wrong_permutation_is_not_the_inverse():
    streams = StreamIndex.from_stream_ids([0, 1, 0, 1, 1])
    wrong = streams._replace(packed=streams.packed.flip(0))
    x = torch.arange(5)
    assert not torch.equal(wrong.merge(*wrong.split(x)), x)


def test_wrong_arguments():
    with pytest.raises(ConfigurationError, match="got 2"):
        StreamIndex.from_stream_ids([0, 1, 2])
    with pytest.raises(ConfigurationError, match=r"got shape \(1, 2\)"):
        StreamIndex.from_stream_ids([[0, 1]])
    with pytest.raises(LengthsError, match="text lists 1 sequences, visual lists 2"):
        StreamIndex.from_lengths([1], [1, 2])
