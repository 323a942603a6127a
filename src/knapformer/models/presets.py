"""Configurations that need no checkpoint: the model that the demo trains, and stand-ins for known models."""

from __future__ import annotations

from knapformer.given.cost import CostModel, Machine
from knapformer.models.config import MMDiTConfig

CELLS = 4
"""Cells of a 16×16-pixel patch from top to bottom, and from left to right."""

PATCH_CHANNELS = CELLS * CELLS * 3
"""Channels of a token: the colours of its cells."""


def make_config(
    *, num_heads: int, head_width: int, num_double_blocks: int, num_single_blocks: int, text_channels: int = 64
) -> MMDiTConfig:
    """An MMDiT for patches, with rotary axes in FLUX.1's proportions: an eighth for time, the rest for the plane."""
    time_axis = max(2, head_width // 8 // 2 * 2)
    plane_axis = (head_width - time_axis) // 4 * 2
    return MMDiTConfig(
        in_channels=PATCH_CHANNELS,
        text_channels=text_channels,
        conditioning_channels=num_heads * head_width // 2 * 2,
        num_heads=num_heads,
        head_width=head_width,
        rope_axes=(head_width - 2 * plane_axis, plane_axis, plane_axis),
        num_double_blocks=num_double_blocks,
        num_single_blocks=num_single_blocks,
    )


def cost_template(config: MMDiTConfig, *, recompute: bool, bytes_per_element: int, ranks_per_node: int) -> CostModel:
    """The cost model of ``config`` before anything is measured: its FLOPs are right, its speed and γ are not."""
    return CostModel(
        hidden=config.width,
        num_heads=config.num_heads,
        gamma=1.0,
        num_layers=config.num_double_blocks + config.num_single_blocks,
        linear_flops_per_token=2.0 * config.width * (4 * config.width + 2 * config.mlp_width),
        pass_factor=4.0 if recompute else 3.0,
        machine=Machine(bytes_per_element=bytes_per_element, ranks_per_node=ranks_per_node),
    )
