"""KnapFormer's data codes, as in ``g2b4i256f1s0``, and the scenarios that are written in them (arXiv 2508.06001)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from knapformer.errors import ConfigurationError
from knapformer.workloads.registry import Request, Rows, Workload, register_workload, workload_names

SCENARIOS = {
    "lowres": "g32b32i256f1s0",
    "mixres": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "joint": "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
    "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1",
    "default-8": "g3b16i256f1s0,g2b8i512f1s0,g2b4i1024f1s0,g1b1i2048f1s0",
}
"""KnapFormer's scenarios for 32 ranks, and its default for 8."""

MODEL = "flux.1-dev"
"""That the paper trains on them."""

MAX_TEXT_TOKENS = 392
_FORM = re.compile(r"g(\d{1,12})b(\d{1,12})i(\d{1,6})f(\d{1,6})s(\d)")
_ASPECT_MULTIPLIER = (0.96, 1.04)


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


def parse_codes(codes: str, known: Iterable[str] = SCENARIOS) -> list[DataCode]:
    """Read data codes joined by commas, or a scenario's name.

    Args:
        codes: what to read.
        known: names that would do as well, for the error.

    Raises:
        ConfigurationError: naming the part that is no code.
    """
    parsed = []
    for part in SCENARIOS.get(codes, codes).split(","):
        match = _FORM.fullmatch(part.strip())
        if match is None:
            raise ConfigurationError(
                f"{part.strip()!r} is neither a workload nor of the form "
                "g{ranks}b{batch}i{resolution}f{frames}s{smooth}, as in g2b4i256f1s0; "
                f"workloads: {', '.join(known)}"
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


def draw_codes(request: Request) -> Rows:
    """KnapFormer's lengths: an aspect multiplier per rank, and per sample 0..392 text tokens."""
    codes = parse_codes(request.name, workload_names())
    once, sequences = sum(c.num_ranks for c in codes), sum(c.num_ranks * c.batch_size for c in codes)
    num_ranks = once if request.num_ranks is None else request.num_ranks
    request.check_size(max(once, num_ranks), sequences * max(1, num_ranks // once))
    rows = []
    for code in codes_of_ranks(codes, num_ranks):
        visual = int(code.visual_tokens * request.rng.uniform(*_ASPECT_MULTIPLIER))
        rows.append([request.rng.randint(0, MAX_TEXT_TOKENS) + visual for _ in range(code.batch_size)])
    return rows


CODES = Workload(
    "gGbBiIfFsS,…",
    draw_codes,
    "data codes, as in g2b4i256f1s0",
    MODEL,
)
"""Of names that are no workload's."""

for _name, _summary in (
    ("lowres", "small images"),
    ("mixres", "images of all sizes"),
    ("joint", "images and videos"),
    ("default-8", "images, 8 ranks"),
):
    register_workload(_name, summary=f"KnapFormer's {_summary}", model=MODEL)(draw_codes)
