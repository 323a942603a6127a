"""Model shapes against figures worked out by hand from the published configurations."""

from __future__ import annotations

import pytest

from knapformer.errors import ConfigurationError
from knapformer.given.cost import CostModel
from knapformer.given.shapes import MODEL_SHAPES, ModelShape, model_shape

FLUX_D = 3072
HAND_COMPUTED_FLOPS_PER_TOKEN = {
    "flux.1-dev": 24 * FLUX_D**2,  # 2 (3 + 1 + 4 + 4) d², in double and single blocks alike
    "qwen-image": 24 * FLUX_D**2,
    "sd3.5-large": 24 * 2432**2,
    "flux.2-dev": 26 * 6144**2,  # 2 (4 + 3 · 3) d²
    "flux.2-klein-9b": 26 * 4096**2,
    "mochi-1": 8 * 3072**2 + 6 * 3072 * 8192,
    "lumina-2": 2 * (2304 * (2304 + 768 + 768 + 2304) + 3 * 2304 * 9216),  # 8 of 24 heads carry keys and values
    "z-image": 8 * 3840**2 + 6 * 3840 * 10240,
    "wan2.1-1.3b": 12 * 1536**2 + 4 * 1536 * 8960 + 4 * 1536 * 512,  # cross-attention: q, out; 512 text tokens
    "pixart-sigma": 28 * 1152**2 + 4 * 1152 * 300,
    "ltx-video-2b": 28 * 2048**2 + 4 * 2048 * 128,
}


@pytest.mark.parametrize(("name", "flops"), HAND_COMPUTED_FLOPS_PER_TOKEN.items())
def test_linear_flops_follow_the_configuration(name, flops):
    assert model_shape(name).linear_flops_per_token == flops


def test_no_two_terms_are_forgotten():
    """The figures above tell shapes apart that differ in one respect only."""
    plain = ModelShape(width=512, num_heads=8, head_width=64, num_layers=1)
    variants = [
        ModelShape(width=512, num_heads=8, head_width=64, num_layers=1, **change)
        for change in (
            {"num_kv_heads": 2},
            {"mlp_width": 1000},
            {"mlp_matrices": 3},
            {"joint": False, "max_text_tokens": 300},
        )
    ]
    assert len({shape.linear_flops_per_token for shape in (plain, *variants)}) == 5
    assert {shape.attention_flops_per_pair for shape in (plain, *variants)} == {4.0 * 512}


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_every_preset_makes_a_cost(name):
    shape, cost = model_shape(name), CostModel.from_preset(name)
    assert (cost.hidden, cost.num_heads, cost.num_layers) == (shape.attention_width, shape.num_heads, shape.num_layers)
    assert shape.width == shape.attention_width
    assert 20 <= cost.linear_flops_per_token / shape.width**2 <= 37


@pytest.mark.parametrize(
    ("name", "size", "tokens"),
    [
        ("flux.1-dev", (1024, 1024), 4096),
        ("flux.1-dev", (1000, 1010), 63 * 64),
        ("flux.1-dev", (1024, 1024, 1, 300), 4396),
        ("wan2.1-1.3b", (720, 1280, 81), 75_600),
        ("wan2.1-1.3b", (720, 1280, 81, 512), 75_600),  # text is not in the sequence
        ("wan2.1-14b", (1080, 1920, 241), 497_760),
        ("wan2.2-ti2v-5b", (704, 1280, 121), 22 * 40 * 31),
        ("ltx-video-2b", (512, 768, 121), 16 * 24 * 16),
        ("mochi-1", (480, 848, 163, 256), 30 * 53 * 28 + 256),
        ("z-image", (1000, 1000, 1, 33), 4000 + 64),  # 63² = 3969 padded to 4000, 33 to 64
    ],
)
def test_tokens_of_a_sample(name, size, tokens):
    assert model_shape(name).tokens(*size) == tokens


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((0, 64), "height must be an integer above 0, got 0"),
        ((64, -1), "width must be an integer above 0, got -1"),
        ((64, 64, 1.5), "frames must be an integer above 0, got 1.5"),
        ((64, 64, 1, -3), "text_tokens must be an integer of at least 0, got -3"),
        ((64, 64, 1, 513), "text_tokens must be at most 512, got 513"),
    ],
)
def test_sizes_that_are_none_are_refused(size, message):
    with pytest.raises(ConfigurationError, match=message):
        model_shape("flux.1-dev").tokens(*size)


def test_an_unknown_model_is_named_with_the_known_ones():
    with pytest.raises(ConfigurationError, match=r"unknown model 'flux9'; known: .*flux\.1-dev"):
        model_shape("flux9")
    assert model_shape("FLUX.1-dev") is MODEL_SHAPES["flux.1-dev"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_heads": 2.5}, "num_heads must be an integer above 0, got 2.5"),
        ({"machine": {"ranks_per_node": 1.5}}, "ranks_per_node must be an integer above 0, got 1.5"),
        ({"machine": {"nodes": ["first"]}}, "nodes must be integers of at most 2147483647, got 'first'"),
        ({"machine": {"nodes": 3}}, "nodes must list one number for each rank, got 3"),
        ({"width": 3}, "unknown keys in a cost file"),
    ],
)
def test_cost_files_that_are_none(change, text):
    content = {"hidden": 64, "num_heads": 4}
    assert CostModel.from_dict(content).flops_per_pair == 256
    with pytest.raises(ConfigurationError, match=text):
        CostModel.from_dict(content | change)
