"""Training samples for the demo: crops, pans and zooms of the photographs that scikit-image's wheel ships.

A token is a 16×16-pixel patch of one frame. Its 48 channels are the colours of 4 × 4 cells of 4×4 pixels each, in
[-1, 1]: few numbers for many pixels, like the latents that real models train on (64 channels in FLUX.1 and in Wan), so
that routing weighs in proportion. Everything about a sample follows from its seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError
from knapformer.models.presets import CELLS, PATCH_CHANNELS
from knapformer.workloads.codes import DataCode
from knapformer.workloads.histograms import Kind, draw_text_tokens

PHOTOGRAPHS = (
    "astronaut.png",
    "brick.png",
    "camera.png",
    "chelsea.png",
    "clock_motion.png",
    "coffee.png",
    "coins.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
    "ihc.png",
    "moon.png",
    "motorcycle_left.png",
    "motorcycle_right.png",
    "retina.jpg",
    "rocket.jpg",
)
"""Files in the wheel, 300×400 to 1411×1411; none is fetched."""

_SMALLEST_CROP = 0.5
"""Smallest side of a crop, as a share of the largest that the photograph holds."""


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """What a sample will be, before any pixel is read.

    Attributes:
        photograph: index into ``PHOTOGRAPHS``.
        frames: 1 for an image.
        rows: tokens from top to bottom.
        columns: tokens from left to right.
        text_tokens: length of the caption.
        seed: of the crop, the camera's path, the caption and the noise.
    """

    photograph: int
    frames: int
    rows: int
    columns: int
    text_tokens: int
    seed: int

    @property
    def visual_tokens(self) -> int:
        return self.frames * self.rows * self.columns


def draw_specs(code: DataCode, rng: random.Random, *, max_text_tokens: int) -> list[SampleSpec]:
    """One rank's batch of one step.

    As in KnapFormer's workloads the batch has one aspect multiplier, which here stretches whole columns of tokens.
    Text lengths follow real captions' (``histograms``), cut at ``max_text_tokens``.
    """
    columns = max(1, round(code.tokens_per_side * rng.uniform(0.96, 1.04)))
    kind: Kind = "image" if code.latent_frames == 1 else "video"
    return [
        SampleSpec(
            photograph=rng.randrange(len(PHOTOGRAPHS)),
            frames=code.latent_frames,
            rows=code.tokens_per_side,
            columns=columns,
            text_tokens=draw_text_tokens(rng, kind, max_tokens=max_text_tokens),
            seed=rng.getrandbits(32),
        )
        for _ in range(code.batch_size)
    ]


class Album:
    """The photographs, read once.

    Raises:
        ConfigurationError: scikit-image is not installed, or a photograph is not in it.
    """

    @cached_property
    def photographs(self) -> list[Any]:
        """RGB images (``PIL.Image.Image``), in the order of ``PHOTOGRAPHS``."""
        try:
            from PIL import Image

            folder = resources.files("skimage") / "data"
        except ImportError:
            raise ConfigurationError(
                "the demo's photographs come with scikit-image: pip install 'knapformer[demo]'"
            ) from None
        missing = [name for name in PHOTOGRAPHS if not (folder / name).is_file()]
        if missing:
            raise ConfigurationError(f"this scikit-image lacks photographs: {', '.join(missing)}")
        images = []
        for name in PHOTOGRAPHS:
            with (folder / name).open("rb") as file:
                images.append(Image.open(file).convert("RGB"))
        return images

    def tokens(self, spec: SampleSpec) -> npt.NDArray[np.float32]:
        """(frames · rows · columns, 48) patches in (frame, row, column) order, in [-1, 1]."""
        photograph = self.photographs[spec.photograph]
        boxes = camera_path(photograph.size, spec)
        size = (spec.columns * CELLS, spec.rows * CELLS)
        frames = [np.asarray(photograph.resize(size, box=box, resample=2), np.float32) for box in boxes]
        return patches(np.stack(frames) / 127.5 - 1.0)


def camera_path(size: tuple[int, int], spec: SampleSpec) -> list[tuple[float, float, float, float]]:
    """The (left, top, right, bottom) box of each frame in a photograph of ``size`` (width, height).

    From one random crop of the sample's aspect ratio to another in equal steps: with a change of size a zoom, without
    a pan. An image is the first crop.
    """
    rng = random.Random(spec.seed)
    scale = min(size[0] / spec.columns, size[1] / spec.rows)
    shares = [rng.uniform(_SMALLEST_CROP, 1.0)] * 2
    if rng.random() < 0.5:
        shares[1] = rng.uniform(_SMALLEST_CROP, 1.0)
    ends = []
    for share in shares:
        width, height = spec.columns * scale * share, spec.rows * scale * share
        left, top = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
        ends.append(np.array([left, top, left + width, top + height]))
    steps = np.linspace(0, 1, spec.frames) if spec.frames > 1 else [0.0]
    limits = np.array([*size, *size])
    boxes = [np.clip(ends[0] + step * (ends[1] - ends[0]), 0, limits) for step in steps]
    return [(float(a), float(b), float(c), float(d)) for a, b, c, d in boxes]


def patches(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """(F, 4 · rows, 4 · columns, 3) cells to (F · rows · columns, 48) patches."""
    count, height, width, channels = frames.shape
    blocks = frames.reshape(count, height // CELLS, CELLS, width // CELLS, CELLS, channels)
    return np.ascontiguousarray(blocks.transpose(0, 1, 3, 2, 4, 5).reshape(-1, CELLS * CELLS * channels))


def position_ids(spec: SampleSpec) -> npt.NDArray[np.int64]:
    """(text + visual tokens, 3) of (frame, row, column): text token i is at (i, 0, 0), pictures start at (0, 1, 1)."""
    text = np.zeros((spec.text_tokens, 3), np.int64)
    text[:, 0] = np.arange(spec.text_tokens)
    grid = np.indices((spec.frames, spec.rows, spec.columns)).reshape(3, -1).T + np.array([0, 1, 1])
    return np.concatenate([text, grid.astype(np.int64)])


def text_embeddings(spec: SampleSpec, channels: int) -> npt.NDArray[np.float32]:
    """(text_tokens, channels) standard normal stand-ins for a text encoder's output: the same words each time."""
    return np.random.default_rng([spec.seed, 1]).standard_normal((spec.text_tokens, channels), np.float32)


def noise(spec: SampleSpec) -> npt.NDArray[np.float32]:
    """(visual tokens, 48) standard normal."""
    return np.random.default_rng([spec.seed, 2]).standard_normal((spec.visual_tokens, PATCH_CHANNELS), np.float32)


def diffusion_time(spec: SampleSpec) -> float:
    """Time in (0, 1): the logit-normal of arXiv 2403.03206."""
    return float(1.0 / (1.0 + np.exp(-np.random.default_rng([spec.seed, 3]).standard_normal())))
