"""Sequence lengths of published training workloads. A name and a seed give the same lengths everywhere.

Three families: KnapFormer's scenarios in its data codes (arXiv 2508.06001), Zellige's Wan 2.1 mixes (arXiv 2608.01150)
and the bucket tables of Open-Sora 1.2 and 2.0; and lognormal lengths for stress.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from knapformer.errors import ConfigurationError
from knapformer.given.shapes import model_shape
from knapformer.workloads.histograms import Kind, draw_text_tokens
from knapformer.workloads.opensora import BUCKET_TABLES, draw_bucket

Rows = list[list[int]]
"""Per rank, the lengths of the sequences it loads."""

SCENARIOS = {
    "lowres": "g32b32i256f1s0",
    "mixres": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "joint": "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
    "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1",
    "default-8": "g3b16i256f1s0,g2b8i512f1s0,g2b4i1024f1s0,g1b1i2048f1s0",
}
"""KnapFormer's scenarios for 32 ranks, and its default for 8."""

GOLDEN = "wan-golden"
"""Zellige's example: three 10 s videos and 228 images, all 720p, on 4 ranks; dealt out in turn, videos first."""

MAX_TEXT_TOKENS = 392
MAX_SEQUENCES = 10_000_000
"""Of a step; a name that means more is a mistake, and would fill the memory."""

WAN_PATTERN, LOGNORMAL_PATTERN = "wan:RANKS:TOKENS:SHARE[:SECONDS]", "lognormal:RANKS:PER_RANK"
_WAN = re.compile(r"wan:([1-9]\d*):([1-9]\d*):(0(?:\.\d*)?|\.\d+|1(?:\.0*)?)(?::([1-9]\d*))?")
_LOGNORMAL = re.compile(r"lognormal:([1-9]\d*):([1-9]\d*)")
_CODE = re.compile(r"g(\d{1,12})b(\d{1,12})i(\d{1,6})f(\d{1,6})s(\d)")
_ASPECT_MULTIPLIER = (0.96, 1.04)
_WAN_SIZES = ((256, 256), (480, 832), (720, 1280), (1088, 1920))
_WAN_VIDEO_WEIGHTS = (6, 3, 1)
_WAN_FRAMES_PER_SECOND = 16
_WAN_FEWEST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class DataCode:
    """``g{ranks}b{batch}i{resolution}f{frames}s{smooth}``: ranks that load equal batches.

    Attributes:
        num_ranks: ranks with such a batch.
        batch_size: samples of each.
        resolution: pixels per side; 16 per token.
        frames: frames of a sample.
        smooth: 0 takes every frame; 1 takes latent frames of a video VAE, a third of them.
    """

    num_ranks: int
    batch_size: int
    resolution: int
    frames: int
    smooth: int

    @property
    def latent_frames(self) -> int:
        return self.frames if self.smooth == 0 else max(int(self.frames / 3.4), 1)

    @property
    def tokens_per_side(self) -> int:
        return self.resolution // 16

    @property
    def visual_tokens(self) -> int:
        return self.tokens_per_side**2 * self.latent_frames

    def __str__(self) -> str:
        return f"g{self.num_ranks}b{self.batch_size}i{self.resolution}f{self.frames}s{self.smooth}"


def parse_codes(codes: str) -> list[DataCode]:
    """Read data codes joined by commas, or a scenario's name.

    Raises:
        ConfigurationError: naming the part that is no code.
    """
    parsed = []
    for part in SCENARIOS.get(codes, codes).split(","):
        match = _CODE.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                f"{part.strip()!r} is neither a workload nor of the form "
                "g{ranks}b{batch}i{resolution}f{frames}s{smooth}, as in g2b4i256f1s0; "
                f"workloads: {', '.join(workload_names())}"
            )
        code = DataCode(*map(int, match.groups()))
        if not code.num_ranks or code.resolution < 16 or not code.frames:
            raise ConfigurationError(f"data code {part.strip()!r} needs ranks, frames and 16 pixels per side at least")
        parsed.append(code)
    return parsed


def codes_of_ranks(codes: Sequence[DataCode], num_ranks: int | None = None) -> list[DataCode]:
    """The code of each rank: in order, and over again where the world is a multiple of their sum.

    Raises:
        ConfigurationError: the world is no multiple.
    """
    once = [code for code in codes for _ in range(code.num_ranks)]
    num_ranks = len(once) if num_ranks is None else num_ranks
    if num_ranks < 1 or num_ranks % len(once):
        raise ConfigurationError(f"{num_ranks} ranks are not a multiple of the data codes' {len(once)}")
    return once * (num_ranks // len(once))


def draw_codes(codes: Sequence[DataCode], rng: random.Random, num_ranks: int | None = None) -> Rows:
    """KnapFormer's lengths: an aspect multiplier per rank, and per sample 0..392 text tokens."""
    rows = []
    for code in codes_of_ranks(codes, num_ranks):
        visual = int(code.visual_tokens * rng.uniform(*_ASPECT_MULTIPLIER))
        rows.append([rng.randint(0, MAX_TEXT_TOKENS) + visual for _ in range(code.batch_size)])
    return rows


def draw_wan(
    num_ranks: int, tokens_per_rank: int, video_share: float, rng: random.Random, *, seconds: int = 10
) -> Rows:
    """Wan 2.1 lengths: videos up to a share of all tokens, then images 256p to 1080p, dealt out in turn.

    The mixes' weights are not published. Videos of 480p, 720p and 1080p are drawn 6:3:1 and images evenly: our choice.
    """
    shape = model_shape("wan2.1-1.3b")
    frames = _WAN_FRAMES_PER_SECOND * seconds + 1
    images = [shape.visual_tokens(height, width) for height, width in _WAN_SIZES]
    videos = [shape.visual_tokens(height, width, frames) for height, width in _WAN_SIZES[1:]]
    total = num_ranks * tokens_per_rank
    pool = _fill(total * video_share, videos, lambda: rng.choices(videos, _WAN_VIDEO_WEIGHTS)[0])
    pool += _fill(total * (1 - video_share), images, lambda: rng.choice(images))
    rng.shuffle(pool)
    return _deal(pool, num_ranks)


def draw_lognormal(num_ranks: int, per_rank: int, rng: random.Random) -> Rows:
    """Lognormal lengths of median 1500 and σ 1.2, between 16 and 131,072."""

    def draw() -> int:
        return max(16, min(131_072, int(rng.lognormvariate(math.log(1500), 1.2))))

    return [[draw() for _ in range(per_rank)] for _ in range(num_ranks)]


def draw_opensora(table: str, num_ranks: int, rng: random.Random) -> Rows:
    """Each rank draws a bucket of its own; in the joint-attention model of 2.0, text lengths follow the captions'."""
    rows = []
    for _ in range(num_ranks):
        bucket = draw_bucket(BUCKET_TABLES[table], rng)
        kind: Kind = "image" if bucket.frames == 1 else "video"
        joint = BUCKET_TABLES[table].joint
        text = [draw_text_tokens(rng, kind) if joint else 0 for _ in range(bucket.batch_size)]
        rows.append([bucket.visual_tokens + tokens for tokens in text])
    return rows


def golden_case() -> Rows:
    """See ``GOLDEN``."""
    shape = model_shape("wan2.1-1.3b")
    videos, images = [shape.visual_tokens(720, 1280, 161)] * 3, [shape.visual_tokens(720, 1280)] * 228
    return _deal(videos + images, 4)


def workload_names() -> list[str]:
    """What ``draw`` accepts beside data codes."""
    return [*SCENARIOS, GOLDEN, *BUCKET_TABLES, WAN_PATTERN, LOGNORMAL_PATTERN]


def draw(name: str, rng: random.Random, num_ranks: int | None = None) -> Rows:
    """The lengths of one step of a workload.

    Args:
        name: one of ``workload_names()``, or data codes.
        rng: advanced; draws follow one another as a training run's steps do.
        num_ranks: for data codes, a multiple of their ranks; for Open-Sora any number, 32 by default. The other names
            fix it.

    Raises:
        ConfigurationError: an unknown name, or ranks that do not fit it.
    """
    if name in BUCKET_TABLES:
        if num_ranks is not None and num_ranks < 1:
            raise ConfigurationError(f"a workload needs at least one rank, got {num_ranks}")
        return draw_opensora(name, 32 if num_ranks is None else num_ranks, rng)
    if name.startswith("wan:"):
        ranks, tokens, share, seconds = _match(_WAN, name, WAN_PATTERN)
        _check_count(name, int(ranks) * max(1, int(tokens) // _WAN_FEWEST_TOKENS))
        rows = draw_wan(int(ranks), int(tokens), float(share), rng, seconds=int(seconds or 10))
    elif name.startswith("lognormal:"):
        ranks, per_rank = _match(_LOGNORMAL, name, LOGNORMAL_PATTERN)
        _check_count(name, int(ranks) * int(per_rank))
        rows = draw_lognormal(int(ranks), int(per_rank), rng)
    elif name == GOLDEN:
        rows = golden_case()
    else:
        codes = parse_codes(name)
        _check_count(name, sum(code.num_ranks * code.batch_size for code in codes))
        return draw_codes(codes, rng, num_ranks)
    if num_ranks not in (None, len(rows)):
        raise ConfigurationError(f"workload {name!r} is for {len(rows)} ranks, got {num_ranks}")
    return rows


def _check_count(name: str, num_sequences: int) -> None:
    if num_sequences > MAX_SEQUENCES:
        raise ConfigurationError(f"workload {name!r} would have {num_sequences:,} sequences, at most {MAX_SEQUENCES:,}")


def workload(name: str, *, seed: int = 0, num_ranks: int | None = None) -> Rows:
    """``draw`` with a generator of its own."""
    return draw(name, random.Random(seed), num_ranks)


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


def _match(pattern: re.Pattern[str], name: str, described: str) -> tuple[str, ...]:
    match = pattern.fullmatch(name)
    if match is None:
        raise ConfigurationError(
            f"workload {name!r} is not of the form {described} with counts of at least 1 and a share in 0..1"
        )
    return match.groups()
