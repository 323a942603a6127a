"""What one rank can see by itself is an error at once, with the value got and the value expected."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from knapformer import Balancer, ConfigurationError, CostModel, LengthsError, Step

LENGTHS = [5, 7]
HEADS, WIDTH = 4, 8


def make_step(lengths: object = LENGTHS, **options: object) -> Step:
    return Balancer(CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)).prepare(lengths, **options)


def heads(rows: int = 12, num_heads: int = HEADS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, num_heads, width, dtype=dtype)


WRONG: dict[str, tuple[Callable[[], tuple[Tensor, ...]], type[Exception], str]] = {
    "rows of q": (lambda: (heads(13), heads(), heads()), LengthsError, "gives it 12 tokens, q has 13"),
    "rows of k and v": (lambda: (heads(), heads(14), heads(14)), LengthsError, "gives it 12 tokens, k has 14"),
    "rows of v": (lambda: (heads(), heads(), heads(11)), LengthsError, "gives it 12 tokens, v has 11"),
    "width of k": (
        lambda: (heads(), heads(width=16), heads(width=16)),
        ConfigurationError,
        "q has heads of width 8, torch.float32 on cpu; expected the same of k, got width 16",
    ),
    "width of v": (lambda: (heads(), heads(), heads(width=4)), ConfigurationError, "the same of v, got width 4"),
    "heads of v": (
        lambda: (heads(), heads(), heads(num_heads=8)),
        ConfigurationError,
        "k has 4 heads, expected as many of v, got 8",
    ),
    "heads of k": (
        lambda: (heads(), heads(num_heads=3), heads(num_heads=3)),
        ConfigurationError,
        "q has 4 heads, expected a multiple of k's 3",
    ),
    "no heads of k": (
        lambda: (heads(), heads(num_heads=0), heads(num_heads=0)),
        ConfigurationError,
        "expected a multiple of k's 0",
    ),
    "dimensions": (
        lambda: (heads().flatten(1), heads(), heads()),
        ConfigurationError,
        "expected q (rows, heads, width), got shape (12, 32)",
    ),
    "dtype": (
        lambda: (heads(), heads(), heads(dtype=torch.bfloat16)),
        ConfigurationError,
        "one dtype, got torch.float32, torch.float32, torch.bfloat16",
    ),
    "device": (lambda: (heads(), heads().to("meta"), heads()), ConfigurationError, "float32 on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_heads(name):
    make, kind, text = WRONG[name]
    with pytest.raises(kind, match=re.escape(text)):
        make_step().attention(*make())


def test_right_heads():
    """The negative control: grouped heads and none of the errors above."""
    assert make_step().attention(heads(), heads(num_heads=2), heads(num_heads=2)).shape == (12, HEADS, WIDTH)


STREAMS = {"text": [1, 2], "visual": [4, 5]}
OTHER_LENGTHS: dict[str, tuple[object, dict[str, object], str]] = {
    "order": (LENGTHS, {"lengths": [7, 5]}, "prepared for tokens [5, 7], got [7, 5]"),
    "count": (LENGTHS, {"lengths": [5, 7, 0]}, "prepared for tokens [5, 7], got [5, 7, 0]"),
    "tensor": (LENGTHS, {"lengths": torch.tensor([6, 6])}, "got [6, 6]"),
    "a stream": (STREAMS, {"lengths": [5, 4], "stream": "visual"}, "stream 'visual' [4, 5], got [5, 4]"),
    "all streams": (STREAMS, {"lengths": {"text": [2, 1], "visual": [4, 5]}}, "stream 'text' [1, 2], got [2, 1]"),
    "unknown stream": (STREAMS, {"lengths": {"text": [1, 2], "image": [4, 5]}}, "'visual' [4, 5], got none"),
    "sums of streams": (STREAMS, {"lengths": [5, 8]}, "prepared for tokens [5, 7], got [5, 8]"),
    "streams of plain lengths": (LENGTHS, {"lengths": STREAMS}, "stream 'text' none, got [1, 2]"),
    "no lengths": (LENGTHS, {"lengths": [5, 7.5]}, "sequence 1: a length must be an integer, got 7.5"),
    "long": ([1] * 40, {"lengths": [1] * 39 + [2]}, "[1, 1, 1, 1, 1, 1, …, 1, 1, 1, 1, 1, 2] (40 of them)"),
}


@pytest.mark.parametrize("name", OTHER_LENGTHS)
def test_a_step_for_other_lengths(name):
    prepared, given, text = OTHER_LENGTHS[name]
    step, stream = make_step(prepared), given.get("stream")
    rows = torch.zeros(9 if stream else step.num_tokens, 3)
    with pytest.raises(LengthsError, match=re.escape(text)) as raised:
        step.route(rows, stream=stream, lengths=given["lengths"])
    assert "rank 0: " in str(raised.value) or name == "no lengths"
    assert step.route(rows, stream=stream).shape == rows.shape


def test_a_step_for_the_same_lengths():
    """The negative control."""
    step, rows = make_step(STREAMS), torch.zeros(12, 3)
    for same in (STREAMS, LENGTHS, torch.tensor(LENGTHS), {"visual": [4, 5], "text": [1, 2]}):
        assert step.route(rows, lengths=same).shape == rows.shape
    assert step.route(rows[:9], stream="visual", lengths=[4, 5]).shape == (9, 3)


def test_conditioning_of_other_lengths():
    step = make_step(conditioning={"context": [3, 1]})
    step.check_lengths(LENGTHS, conditioning={"context": [3, 1]})
    with pytest.raises(LengthsError, match=re.escape("rows of conditioning 'context' [3, 1], got [1, 3]")):
        step.check_lengths(LENGTHS, conditioning={"context": [1, 3]})
