"""Zellige's mixes of videos and images for Wan 2.1 (arXiv 2608.01150)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from knapformer.given.shapes import model_shape
from knapformer.workloads.registry import Request, Rows, register_workload

MODEL = "wan2.1-1.3b"

_SIZES = ((256, 256), (480, 832), (720, 1280), (1088, 1920))
_VIDEO_WEIGHTS = (6, 3, 1)
_FRAMES_PER_SECOND = 16
_FEWEST_TOKENS = 256


@register_workload("wan-golden", summary="Zellige's example, 4 ranks", model=MODEL)
def golden_case(request: Request | None = None) -> Rows:
    """Three 10 s videos and 228 images, all 720p, on 4 ranks; dealt out in turn, videos first."""
    shape = model_shape(MODEL)
    videos, images = [shape.visual_tokens(720, 1280, 161)] * 3, [shape.visual_tokens(720, 1280)] * 228
    return _deal(videos + images, 4)


@register_workload("wan:RANKS:TOKENS:SHARE[:SECONDS]", summary="Zellige's mixes", model=MODEL)
def draw_wan(request: Request) -> Rows:
    """Wan 2.1 lengths, ``TOKENS`` a rank: videos of ``SECONDS`` (10) up to a share, then images of 256p to 1080p.

    They are dealt out in turn. The mixes' weights are not published: that videos of 480p, 720p and 1080p are drawn
    6:3:1, and images evenly, is our choice.
    """
    num_ranks, tokens_per_rank = request.count("RANKS"), request.count("TOKENS")
    video_share, seconds = request.share("SHARE"), request.count("SECONDS", 10)
    request.check_size(num_ranks, num_ranks * max(1, tokens_per_rank // _FEWEST_TOKENS))
    rng, shape = request.rng, model_shape(MODEL)
    frames = _FRAMES_PER_SECOND * seconds + 1
    images = [shape.visual_tokens(height, width) for height, width in _SIZES]
    videos = [shape.visual_tokens(height, width, frames) for height, width in _SIZES[1:]]
    total = num_ranks * tokens_per_rank
    pool = _fill(total * video_share, videos, lambda: rng.choices(videos, _VIDEO_WEIGHTS)[0])
    pool += _fill(total * (1 - video_share), images, lambda: rng.choice(images))
    rng.shuffle(pool)
    return _deal(pool, num_ranks)


def _fill(budget: float, kinds: Sequence[int], draw_one: Callable[[], int]) -> list[int]:
    """Draw lengths until the budget is spent; the smallest kind stands in for one that no longer fits."""
    pool = []
    while budget > 0:
        length = draw_one()
        if length > budget and budget < min(kinds):
            break
        if length > budget:
            length = min(kinds)
        pool.append(length)
        budget -= length
    return pool


def _deal(pool: Sequence[int], num_ranks: int) -> Rows:
    return [list(pool[rank::num_ranks]) for rank in range(num_ranks)]
