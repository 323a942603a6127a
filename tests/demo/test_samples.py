"""Samples are real pictures cut into patches, of the sizes that the data codes say."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("skimage")
pytest.importorskip("PIL")

from knapformer.demo.samples import (
    PATCH_CHANNELS,
    PHOTOGRAPHS,
    Album,
    SampleSpec,
    camera_path,
    diffusion_time,
    draw_specs,
    noise,
    patches,
    position_ids,
    text_embeddings,
)
from knapformer.workloads.codes import parse_codes


@pytest.fixture(scope="module")
def album():
    return Album()


def specs(code: str, seed: int = 0, max_text_tokens: int = 50) -> list[SampleSpec]:
    return draw_specs(parse_codes(code)[0], random.Random(seed), max_text_tokens=max_text_tokens)


def test_all_photographs_are_there_and_differ(album):
    assert len(album.photographs) == len(PHOTOGRAPHS) >= 12
    assert max(image.size for image in album.photographs) == (1411, 1411)
    means = {tuple(np.asarray(image).mean(axis=(0, 1)).round(3)) for image in album.photographs}
    assert len(means) == len(PHOTOGRAPHS)


def test_a_batch_has_the_codes_sizes():
    batch = specs("g1b20i256f4s0")
    assert len(batch) == 20
    assert {(s.frames, s.rows) for s in batch} == {(4, 16)}
    assert {s.columns for s in batch} <= {15, 16, 17} and len({s.columns for s in batch}) == 1
    assert all(1 <= s.text_tokens <= 50 for s in batch)
    assert len({s.seed for s in batch}) == 20
    assert specs("g1b20i256f4s0") == batch != specs("g1b20i256f4s0", seed=1)


def test_tokens_are_patches_of_the_photograph(album):
    spec = SampleSpec(photograph=0, frames=1, rows=3, columns=2, text_tokens=0, seed=1)
    tokens = album.tokens(spec)
    assert tokens.shape == (6, PATCH_CHANNELS) and tokens.dtype == np.float32
    assert -1 <= tokens.min() < tokens.max() <= 1
    box = camera_path(album.photographs[0].size, spec)[0]
    cells = tokens.reshape(3, 2, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(12, 8, 3)
    picture = np.asarray(album.photographs[0].resize((32, 48), box=box, resample=2), np.float32) / 127.5 - 1
    means = picture.reshape(12, 4, 8, 4, 3).mean((1, 3))
    assert 3 * np.abs(cells - means).mean() < np.abs(cells - np.roll(means, 1, axis=1)).mean()


def test_patches_come_in_frame_row_column_order():
    frames = np.zeros((2, 8, 12, 3), np.float32)
    for frame in range(2):
        for row in range(2):
            for column in range(3):
                frames[frame, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 100 * frame + 10 * row + column
    assert patches(frames)[:, 0].tolist() == [0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112]


def test_videos_move_and_stay_inside_the_photograph(album):
    zooms = 0
    for seed in range(40):
        spec = SampleSpec(photograph=seed % 16, frames=5, rows=8, columns=9, text_tokens=0, seed=seed)
        width, height = album.photographs[spec.photograph].size
        boxes = np.array(camera_path((width, height), spec))
        assert (boxes >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
        assert not np.allclose(boxes[0], boxes[-1])
        assert np.allclose(np.diff(boxes, axis=0), boxes[1] - boxes[0], atol=1e-6)
        sides = boxes[:, 2:] - boxes[:, :2]
        assert np.allclose(sides[:, 0] / sides[:, 1], 9 / 8)
        zooms += not np.allclose(sides[0], sides[-1])
    assert 10 < zooms < 30
    frames = album.tokens(spec).reshape(5, -1)
    assert all(not np.array_equal(frames[0], frame) for frame in frames[1:])


def test_positions_tell_every_token_apart():
    spec = SampleSpec(photograph=0, frames=2, rows=3, columns=4, text_tokens=5, seed=0)
    ids = position_ids(spec)
    assert ids.shape == (29, 3) and ids.dtype == np.int64
    assert len({tuple(row) for row in ids.tolist()}) == 29
    assert ids[4].tolist() == [4, 0, 0] and ids[5].tolist() == [0, 1, 1] and ids[-1].tolist() == [1, 3, 4]


def test_a_sample_is_the_same_each_time(album):
    spec, other = (SampleSpec(photograph=3, frames=2, rows=2, columns=2, text_tokens=4, seed=s) for s in (5, 6))
    for make in (album.tokens, lambda s: text_embeddings(s, 8), noise, diffusion_time):
        assert np.array_equal(make(spec), make(spec))
        assert not np.array_equal(make(spec), make(other))
    assert text_embeddings(spec, 8).shape == (4, 8) and noise(spec).shape == (8, PATCH_CHANNELS)
    assert 0 < diffusion_time(spec) < 1
