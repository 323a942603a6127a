"""Configurations: what is refused, what is filled in, and that presets have their published size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knapformer.errors import ConfigurationError
from knapformer.models import DIT_PRESETS, MMDIT_PRESETS, DiT, DiTConfig, MMDiT, timestep_embedding

TINY = MMDIT_PRESETS["tiny"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads must be an integer of at least 1, got 0"),
        ({"num_heads": 2.0}, r"num_heads must be an integer of at least 1, got 2\.0"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide num_heads, got 3 for 4 heads"),
        ({"rope_axes": (8, 12, 10)}, r"sum to head_width = 32, got \(8, 12, 10\)"),
        ({"rope_axes": (9, 11, 12)}, r"even, positive.*got \(9, 11, 12\)"),
        ({"rope_axes": (-2, 22, 12)}, r"even, positive.*got \(-2, 22, 12\)"),
        ({"rope_theta": 0.5}, r"rope_theta must be above 1, got 0\.5"),
        ({"text_channels": -1}, "text_channels must be an integer of at least 1, got -1"),
        ({"num_double_blocks": 0, "num_single_blocks": 0}, "must be at least 1, got 0"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        replace(TINY, **changes)


def test_defaults():
    assert (TINY.width, TINY.num_kv_heads, TINY.mlp_width, TINY.out_channels) == (128, 4, 512, 64)
    dit = DiTConfig(in_channels=3, conditioning_channels=2, num_heads=2, head_width=10, rope_axes=[10], num_blocks=1)
    assert (dit.mlp_width, dit.rope_axes) == (56, (10,))
    with pytest.raises(ConfigurationError, match="num_blocks must be an integer of at least 1, got 0"):
        replace(dit, num_blocks=0)


def test_presets_have_the_published_size():
    """FLUX.1-dev has 11.9 billion parameters (two of its embedders are the caller's here), DiT-XL 675 million."""
    with torch.device("meta"):
        flux, dit = MMDiT(MMDIT_PRESETS["flux.1-dev"]), DiT(DIT_PRESETS["dit-xl"])
    assert sum(p.numel() for p in flux.parameters()) == pytest.approx(11.9e9, rel=0.01)
    assert sum(p.numel() for p in dit.parameters()) == pytest.approx(675e6, rel=0.01)
    assert len(flux.blocks) == 57


def test_timestep_embedding():
    features = timestep_embedding(torch.tensor([0.0, 0.5], dtype=torch.float64), 4)
    angles = torch.tensor([500.0, 5.0], dtype=torch.float64)
    torch.testing.assert_close(features[0], torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(features[1], torch.cat([angles.cos(), angles.sin()]))
    with pytest.raises(ValueError, match="even, got 3"):
        timestep_embedding(torch.zeros(1), 3)
