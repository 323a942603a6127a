"""Rotary embedding: relative positions, exactness, and its layout against a plain loop."""

from __future__ import annotations

import math

import pytest
import torch

from knapformer.models.rope import rotate, rotations

AXES, THETA = (4, 6, 2), 500.0


def rotated(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    return rotate(x, rotations(position_ids, AXES, theta=THETA, dtype=x.dtype))


@pytest.fixture
def vectors():
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 10, 3, 12, generator=random, dtype=torch.float64)
    return q, k, torch.randint(0, 10_000, (10, 3), generator=random)


def test_equals_a_plain_loop(vectors):
    q, _, ids = vectors
    out = rotated(q, ids)
    pairs = [(axis, 2 * j / width) for axis, width in enumerate(AXES) for j in range(width // 2)]
    for token in range(10):
        for pair, (axis, exponent) in enumerate(pairs):
            angle = int(ids[token, axis]) * THETA**-exponent
            a, b = q[token, 1, 2 * pair], q[token, 1, 2 * pair + 1]
            assert math.isclose(out[token, 1, 2 * pair], a * math.cos(angle) - b * math.sin(angle), abs_tol=1e-12)
            assert math.isclose(out[token, 1, 2 * pair + 1], a * math.sin(angle) + b * math.cos(angle), abs_tol=1e-12)


def test_scores_depend_on_relative_positions_only(vectors):
    q, k, ids = vectors
    key_ids = ids.flip(0)
    shift = torch.tensor([7, -3, 100])

    def scores(query_ids, key_ids):
        return torch.einsum("qhd,khd->hqk", rotated(q, query_ids), rotated(k, key_ids))

    reference = scores(ids, key_ids)
    torch.testing.assert_close(scores(ids + shift, key_ids + shift), reference, rtol=0, atol=1e-9)
    assert (scores(ids + shift, key_ids) - reference).abs().max() > 0.1


def test_preserves_norms_and_dtype(vectors):
    q, _, ids = vectors
    torch.testing.assert_close(rotated(q, ids).norm(dim=-1), q.norm(dim=-1), rtol=1e-12, atol=0)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        out = rotated(q.to(dtype), ids)
        assert out.dtype == dtype
        assert (out.double() - rotated(q.to(dtype).double(), ids)).norm() / q.norm() < tolerance


def test_no_tokens():
    assert rotated(torch.zeros(0, 3, 12), torch.zeros(0, 3, dtype=torch.int64)).shape == (0, 3, 12)


@pytest.mark.parametrize(
    ("ids", "message"),
    [(torch.zeros(2, 2, dtype=torch.int64), r"\(T, 3\), got \(2, 2\)"), (torch.zeros(2, 3), "float32")],
)
def test_wrong_position_ids(ids, message):
    with pytest.raises(ValueError, match=message):
        rotations(ids, AXES, theta=THETA, dtype=torch.float32)
