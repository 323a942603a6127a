"""Shapes of known models: what a layer costs per token and per query-key pair."""

from __future__ import annotations

from dataclasses import dataclass

from knapformer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """FLOPs of one layer's forward pass, averaged over the layers.

    Attributes:
        num_heads: attention heads.
        attention_width: heads × head width.
        linear_flops_per_token: all token-wise work of a layer.
        attention_flops_per_pair: per query-key pair, over all heads.
        num_layers: transformer blocks.
    """

    num_heads: int
    attention_width: int
    linear_flops_per_token: float
    attention_flops_per_pair: float
    num_layers: int


MODEL_SHAPES = {"flux.1-dev": ModelShape(24, 3072, 24.0 * 3072**2, 4.0 * 3072, 57)}


def model_shape(name: str) -> ModelShape:
    """The shape of a known model.

    Raises:
        ConfigurationError: listing the known names.
    """
    if name not in MODEL_SHAPES:
        raise ConfigurationError(f"unknown model {name!r}; known: {', '.join(sorted(MODEL_SHAPES))}")
    return MODEL_SHAPES[name]
