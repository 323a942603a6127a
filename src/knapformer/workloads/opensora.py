"""Open-Sora's bucket tables: every rank draws a bucket, and with it a resolution, a clip length and a batch size.

The tables are Open-Sora's. What samples meet them is not published with them, so that is our choice: videos and images
79:21, clip lengths as in ``histograms``, every sample large enough for every bucket. As in Open-Sora a sample tries the
largest resolution first, is let in with the bucket's probability, and takes the longest clip that it can fill. Buckets
come up as often as their batches do: by samples over batch size.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from knapformer.errors import ConfigurationError
from knapformer.workloads.histograms import CLIP_FRAMES, VIDEO_PERCENT, Kind, draw_text_tokens
from knapformer.workloads.registry import Draw, Request, Rows, register_workload

DEFAULT_RANKS = 32
MODEL = "open-sora-2.0"
"""Of all tables: Open-Sora 1.2's own attends over space and time apart, which is no self-attention to balance."""

_FIRST_CLIP_FRAMES = 48


@dataclass(frozen=True)
class Bucket:
    """Samples of one shape.

    Attributes:
        resolution: its name.
        frames: 1 for images.
        accept: probability that a sample that fits is let in.
        batch_size: samples per rank and step.
        visual_tokens: of each sample.
    """

    resolution: str
    frames: int
    accept: float
    batch_size: int
    visual_tokens: int


@dataclass(frozen=True)
class BucketTable:
    """Buckets, the largest resolution first.

    Attributes:
        joint: the model takes text into its sequences.
        buckets: all of them.
    """

    joint: bool
    buckets: tuple[Bucket, ...]

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """How often each bucket is drawn, up to a factor."""
        share: dict[Bucket, float] = defaultdict(float)
        for frames, percent in [(1, 100.0 - VIDEO_PERCENT), *_clips()]:
            left = percent
            for buckets in self._by_resolution(frames):
                bucket = max(buckets, key=lambda b: b.frames)
                share[bucket] += left * bucket.accept
                left *= 1 - bucket.accept
        return tuple(share[bucket] / bucket.batch_size for bucket in self.buckets)

    def _by_resolution(self, frames: int) -> list[list[Bucket]]:
        fitting: dict[str, list[Bucket]] = defaultdict(list)
        for bucket in self.buckets:
            if (bucket.frames == 1) == (frames == 1) and bucket.frames <= frames:
                fitting[bucket.resolution].append(bucket)
        return list(fitting.values())


def draw_bucket(table: BucketTable, rng: random.Random) -> Bucket:
    """One rank's bucket of one step."""
    return rng.choices(table.buckets, table.weights)[0]


def _clips() -> list[tuple[int, float]]:
    """(frames, percent of all samples) of videos, even inside each bin of the histogram."""
    starts = [_FIRST_CLIP_FRAMES, *(end for end, _ in CLIP_FRAMES[:-1])]
    return [
        (frames, percent / (end - start) * VIDEO_PERCENT / 100)
        for start, (end, percent) in zip(starts, CLIP_FRAMES, strict=True)
        for frames in range(start + 1, end + 1)
    ]


def _bands(resolution: str, tokens: int, accept: float, batch_sizes: tuple[int, ...]) -> list[Bucket]:
    """Open-Sora 2.0 has a bucket every 4 frames from 5 to 129, with equal batches over bands of them."""
    bands = (range(5, 34, 4), range(37, 66, 4), range(69, 98, 4), range(101, 130, 4))
    return [
        Bucket(resolution, frames, accept, batch_size, tokens * ((frames - 1) // 4 + 1))
        for band, batch_size in zip(bands, batch_sizes, strict=True)
        for frames in band
    ]


def _stage_3() -> list[Bucket]:
    """Open-Sora 1.2: 51 frames are 15 latent ones."""
    latent_frames = {1: 1, 51: 15, 102: 30, 204: 60, 408: 120}
    table = {
        ("2048", 16384): [(0.05, 5)],
        ("1080p", 8160): [(0.1, 5)],
        ("1024", 4096): [(0.3, 36), (0.1, 2), (0.1, 1)],
        ("720p", 3600): [(0.3, 36), (0.2, 2), (0.1, 1)],
        ("480p", 1590): [(1.0, 89), (0.5, 5), (0.5, 3), (0.5, 1)],
        ("512", 1024): [(1.0, 141), (0.5, 8), (0.5, 4), (0.5, 2), (0.5, 1)],
        ("360p", 920): [(1.0, 141), (0.5, 8), (0.5, 4), (0.5, 2), (0.5, 1)],
        ("240p", 405): [(1.0, 297), (0.5, 20), (0.5, 10), (0.5, 5), (0.5, 2)],
        ("256", 256): [(1.0, 297), (0.5, 20), (0.5, 10), (0.5, 5), (0.5, 2)],
        ("144p", 144): [(1.0, 475), (1.0, 51), (1.0, 27), (1.0, 13), (1.0, 6)],
    }
    return [
        Bucket(resolution, frames, accept, batch_size, tokens * latent_frames[frames])
        for (resolution, tokens), row in table.items()
        for frames, (accept, batch_size) in zip(latent_frames, row, strict=False)
    ]


BUCKET_TABLES: dict[str, BucketTable] = {
    "open-sora-2.0-stage1": BucketTable(
        joint=True,
        buckets=(
            Bucket("1024px", 1, 0.5, 7, 4096),
            Bucket("768px", 1, 0.5, 13, 2304),
            Bucket("256px", 1, 1.0, 45, 256),
            *_bands("256px", 256, 1.0, (12, 6, 4, 3)),
        ),
    ),
    "open-sora-2.0-stage2": BucketTable(
        joint=True,
        buckets=(
            Bucket("768px", 1, 0.5, 38, 2304),
            *_bands("768px", 2304, 0.5, (6, 4, 3, 2)),
            Bucket("256px", 1, 1.0, 130, 256),
            *_bands("256px", 256, 1.0, (14, 10, 7, 6)),
        ),
    ),
    "open-sora-1.2-stage3": BucketTable(joint=False, buckets=tuple(_stage_3())),
}
"""In stage 2 of 2.0 half of the samples that could take 768px do: the table does not say, so this is our choice."""


def _drawn_from(table: BucketTable) -> Draw:
    """Each rank draws a bucket of its own; in the joint-attention model of 2.0, text lengths follow the captions'."""

    def draw(request: Request) -> Rows:
        num_ranks = DEFAULT_RANKS if request.num_ranks is None else request.num_ranks
        if num_ranks < 1:
            raise ConfigurationError(f"a workload needs at least one rank, got {num_ranks}")
        request.check_size(num_ranks, num_ranks)
        rows = []
        for _ in range(num_ranks):
            bucket = draw_bucket(table, request.rng)
            kind: Kind = "image" if bucket.frames == 1 else "video"
            text = [draw_text_tokens(request.rng, kind) if table.joint else 0 for _ in range(bucket.batch_size)]
            rows.append([bucket.visual_tokens + tokens for tokens in text])
        return rows

    return draw


for _name, _table in BUCKET_TABLES.items():
    register_workload(_name, summary="its buckets, any ranks", model=MODEL)(_drawn_from(_table))
