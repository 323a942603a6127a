"""Workloads: the same lengths as the agreed evaluator's generator, and shapes that follow the published tables."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest

from knapformer.errors import ConfigurationError
from knapformer.workloads.codes import codes_of_ranks, parse_codes
from knapformer.workloads.histograms import CAPTION_TOKENS, CLIP_FRAMES, draw_text_tokens
from knapformer.workloads.opensora import BUCKET_TABLES
from knapformer.workloads.wan import golden_case
from knapformer.workloads.workloads import draw, workload, workload_names

STORED = {
    ("lowres", None, 0): "9ba56cf2041578ee",
    ("mixres", None, 7): "8436db5f70b6f676",
    ("joint", None, 1): "0328eed634828ac0",
    ("joint", 64, 2): "1e2a1bedb4810cb0",
    ("g1b2i256f1s0,g1b1i512f85s1", 4, 3): "24906900f498195d",
    ("wan:16:350000:.35", None, 0): "9da11abb8e8086f2",
    ("wan:32:175000:0.6:15", None, 4): "0cd134e379aedd46",
    ("wan:8:125000:0.5", None, 8): "4527034df215a43a",
    ("lognormal:32:8", None, 5): "60bc3b4f74ac847d",
}
"""(workload, ranks, seed): start of the SHA-256 of the lengths as JSON, written by the evaluator's own generator."""


def digest(rows: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("case", "stored"), STORED.items())
def test_lengths_are_those_of_the_evaluators_generator(case, stored):
    name, ranks, seed = case
    assert digest(workload(name, seed=seed, num_ranks=ranks)) == stored
    assert digest(workload(name, seed=seed + 1, num_ranks=ranks)) != stored


def test_first_rows_in_plain_sight():
    assert workload("mixres", seed=0)[:2] == [[651, 478, 283, 395], [513, 472, 420, 509]]
    assert workload("lognormal:2:3", seed=0) == [[1203, 1559, 3469], [1336, 8179, 238]]
    assert [sum(row) for row in golden_case()] == [352_800, 352_800, 352_800, 205_200]


@pytest.mark.parametrize("name", ["lowres", "mixres", "joint"])
def test_scenarios_are_for_32_ranks_and_repeat(name):
    assert len(workload(name)) == 32
    assert len(workload(name, num_ranks=64)) == 64
    with pytest.raises(ConfigurationError, match="33 ranks are not a multiple of the data codes' 32"):
        workload(name, num_ranks=33)


def test_codes_give_each_rank_its_batch():
    codes = parse_codes("g2b3i256f1s0,g1b1i512f85s1")
    assert [str(code) for code in codes_of_ranks(codes, 6)] == 2 * ["g2b3i256f1s0", "g2b3i256f1s0", "g1b1i512f85s1"]
    assert [code.visual_tokens for code in codes] == [16**2, 32**2 * 25]
    assert parse_codes("default-8") == parse_codes("g3b16i256f1s0,g2b8i512f1s0,g2b4i1024f1s0,g1b1i2048f1s0")


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_wan_mixes_hold_the_videos_share(share):
    lengths = np.concatenate(workload(f"wan:16:350000:{share}", seed=3))
    videos = lengths[lengths > 8160]
    assert lengths.sum() == pytest.approx(16 * 350_000, rel=0.02)
    assert videos.sum() / lengths.sum() == pytest.approx(share, abs=0.02)


def test_opensora_buckets_are_closer_to_balance_in_tokens_than_in_pairs():
    rows = workload("open-sora-1.2-stage3", seed=0, num_ranks=256)
    tokens, pairs = [np.array([sum(n**power for n in row) for row in rows]) for power in (1, 2)]
    assert 2 * tokens.std() / tokens.mean() < pairs.std() / pairs.mean()
    assert len({len(row) for row in rows}) > 5


def test_opensora_weights_follow_the_histograms():
    """Of stage 1's samples, 79 % are videos; a bucket's samples are its weight times its batch."""
    table = BUCKET_TABLES["open-sora-2.0-stage1"]
    samples = {bucket: weight * bucket.batch_size for bucket, weight in zip(table.buckets, table.weights, strict=True)}
    total = sum(samples.values())
    videos = sum(n for bucket, n in samples.items() if bucket.frames > 1)
    images = {bucket.resolution: n for bucket, n in samples.items() if bucket.frames == 1}
    assert total == pytest.approx(100) and videos == pytest.approx(79)
    assert images == pytest.approx({"1024px": 10.5, "768px": 5.25, "256px": 5.25})
    longest = next(n for bucket, n in samples.items() if bucket.frames == 129)
    above_128 = sum(percent for end, percent in CLIP_FRAMES if end > 128)
    assert longest == pytest.approx(79 * above_128 / 100, abs=0.5)


def test_open_sora_2_sequences_hold_text_and_1_2_ones_do_not():
    sizes = {bucket.visual_tokens for bucket in BUCKET_TABLES["open-sora-1.2-stage3"].buckets}
    assert {n for row in workload("open-sora-1.2-stage3", num_ranks=64) for n in row} <= sizes
    rows = workload("open-sora-2.0-stage1", num_ranks=64)
    assert any(len(set(row)) > 1 for row in rows)


@pytest.mark.parametrize("kind", CAPTION_TOKENS)
def test_text_lengths_follow_the_histogram(kind):
    rng = random.Random(0)
    drawn = np.array([draw_text_tokens(rng, kind) for _ in range(20_000)])
    ends = np.array([0, *(end for end, _ in CAPTION_TOKENS[kind])])
    shares = np.histogram(drawn, ends + 0.5)[0] / len(drawn) * 100
    percents = [percent for _, percent in CAPTION_TOKENS[kind]]
    assert shares == pytest.approx(np.array(percents) / sum(percents) * 100, abs=1.0)
    other = "video" if kind == "image" else "image"
    assert np.median(drawn) != pytest.approx(np.median([draw_text_tokens(rng, other) for _ in range(2000)]), rel=0.3)
    assert max(draw_text_tokens(rng, kind, max_tokens=9) for _ in range(100)) == 9


def test_histograms_are_percentages():
    for histogram in (CLIP_FRAMES, *CAPTION_TOKENS.values()):
        assert sum(percent for _, percent in histogram) == pytest.approx(100, abs=0.5)
        assert list(histogram) == sorted(histogram)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("nonsense", None, "'nonsense' is neither a workload nor of the form"),
        ("g1b1i256f1s0,oops", None, "'oops' is neither"),
        ("g0b1i256f1s0", None, "needs ranks, frames and 16 pixels per side"),
        ("wan:8:125000", None, "is not of the form wan:RANKS"),
        ("wan:8:125000:1.5", None, "is not of the form wan:RANKS"),
        ("wan:8:125000:.5", 16, "is for 8 ranks, got 16"),
        ("lognormal:0:3", None, "is not of the form lognormal:RANKS:PER_RANK"),
        ("open-sora-2.0-stage1", 0, "at least one rank, got 0"),
        ("mixres", 0, "0 ranks are not a multiple"),
    ],
)
def test_a_wrong_name_or_world_is_refused(name, ranks, message):
    with pytest.raises(ConfigurationError, match=message):
        workload(name, num_ranks=ranks)


def test_every_fixed_name_can_be_drawn_again_and_again():
    rng = random.Random(1)
    for name in workload_names():
        if ":" not in name:
            first, second = draw(name, rng), draw(name, rng)
            assert (first == second) == (name == "wan-golden")
