"""How long captions and clips are in a real corpus: Open-Sora 1.1's, 9.7M videos and 2.6M images."""

from __future__ import annotations

import random
from typing import Literal

Histogram = tuple[tuple[int, float], ...]
"""(upper end, percent) of bins that follow one another; the first one starts where the histogram's user says."""

Kind = Literal["image", "video"]

CAPTION_TOKENS: dict[Kind, Histogram] = {
    "image": (
        (10, 6.7),
        (20, 13.1),
        (30, 10.7),
        (40, 7.6),
        (60, 10.4),
        (80, 6.8),
        (100, 5.3),
        (120, 8.8),
        (140, 11.1),
        (160, 8.9),
        (200, 5.6),
        (250, 2.7),
        (300, 1.5),
        (400, 0.9),
    ),
    "video": (
        (15, 39.8),
        (30, 41.4),
        (45, 1.6),
        (80, 0.6),
        (100, 1.5),
        (120, 5.7),
        (140, 5.0),
        (160, 2.9),
        (200, 1.2),
        (320, 0.3),
    ),
}
"""T5 tokens of captions, from 0."""

CLIP_FRAMES: Histogram = (
    (64, 9.7),
    (80, 16.9),
    (96, 11.8),
    (128, 18.8),
    (160, 10.0),
    (200, 8.4),
    (256, 8.9),
    (320, 5.5),
    (384, 4.3),
    (448, 2.9),
    (512, 2.8),
)
"""Frames of videos, from 48, to a point."""

VIDEO_PERCENT = 79
"""Videos among all samples."""


def draw_text_tokens(rng: random.Random, kind: Kind, *, max_tokens: int | None = None) -> int:
    """T5 tokens of a caption, at least 1: a bin by its weight, then a place in it, evenly; longer ones are cut."""
    histogram = CAPTION_TOKENS[kind]
    bin_index = rng.choices(range(len(histogram)), [percent for _, percent in histogram])[0]
    low = histogram[bin_index - 1][0] if bin_index else 0
    tokens = rng.randint(low + 1, histogram[bin_index][0])
    return tokens if max_tokens is None else min(tokens, max_tokens)
