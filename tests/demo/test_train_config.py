"""Settings of a comparison: what is refused, and what is run by default."""

from __future__ import annotations

import pytest

from knapformer.demo.config import DEMO_CODES, TrainConfig, default_planners
from knapformer.errors import ConfigurationError
from knapformer.models.presets import cost_template, make_config
from knapformer.plans.registry import PlannerSpec
from knapformer.workloads.codes import parse_codes


@pytest.mark.parametrize("text", ["home", "whole", "ulysses", "moldable", "bags:g1n2+g2n1"])
def test_planner_specs_parse_and_print(text):
    assert str(PlannerSpec.parse(text)) == text
    assert str(PlannerSpec.parse("bags:g2n1+g1n1")) == "bags:g1n1+g2n1"


@pytest.mark.parametrize("text", ["best", "bags", "home:g1n2", "bags:g2", ""])
def test_wrong_planner_specs_are_refused(text):
    with pytest.raises(ConfigurationError):
        PlannerSpec.parse(text)


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, "home bags:g1n1 moldable"),
        (2, "home bags:g2n1 moldable"),
        (3, "home bags:g3n1 moldable"),
        (4, "home bags:g2n2 bags:g4n1 moldable"),
        (6, "home bags:g2n3 moldable"),
        (8, "home bags:g2n4 bags:g4n2 bags:g8n1 moldable"),
    ],
)
def test_default_planners(num_ranks, expected):
    assert " ".join(map(str, default_planners(num_ranks))) == expected


def test_the_demo_holds_a_sequence_that_is_heavier_than_the_mean_load():
    """So that moving whole sequences cannot balance it, at γ of 0.6 as of 1.3."""
    settings = TrainConfig(planners=default_planners(2))
    model = make_config(num_heads=settings.num_heads, head_width=32, num_double_blocks=1, num_single_blocks=1)
    cost = cost_template(model, recompute=False, bytes_per_element=4, ranks_per_node=2)
    video, images = parse_codes(DEMO_CODES)
    lengths = [video.visual_tokens, *[images.visual_tokens + settings.max_text_tokens] * images.batch_size]
    work = cost.work_s(lengths)
    assert work[0] > 1.5 * work.sum() / 2
    assert work[1:].max() < work.sum() / 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of float32, float64, bfloat16, got 'int8'"),
        ({"checkpoint": "all"}, "checkpoint must be one of"),
        ({"steps": 2, "warmup_steps": 2}, "warm-up steps must be fewer than steps, got 2 of 2"),
        ({"planners": ()}, "given once each"),
        ({"planners": (PlannerSpec("home"),) * 2}, "given once each, got home, home"),
        ({"codes": "g1b1"}, "'g1b1' is neither"),
        ({"max_text_tokens": 0}, "text tokens must be 1 to 4,096, got 0"),
        ({"learning_rate": 0.0}, "1000 at most, got 0.0"),
    ],
)
def test_settings_that_make_no_comparison_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        TrainConfig(**{"planners": (PlannerSpec("home"),), **changes})
