"""Model configurations, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass

from knapformer.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """What DiT and MMDiT have in common.

    Attributes:
        in_channels: channels of a visual token (pixels or latents of its patch).
        conditioning_channels: channels of the per-sequence vector.
        num_heads: query heads.
        head_width: channels of a head.
        num_kv_heads: key and value heads; 0 means num_heads. It divides num_heads.
        mlp_width: inner channels of the MLP; 0 means 4 · width.
        rope_axes: channels of a head that each position axis rotates; even, and their sum is head_width.
        rope_theta: base of the rotary wavelengths.
        out_channels: channels of an output token; 0 means in_channels.
    """

    in_channels: int
    conditioning_channels: int
    num_heads: int
    head_width: int
    rope_axes: tuple[int, ...]
    num_kv_heads: int = 0
    mlp_width: int = 0
    rope_theta: float = 10_000.0
    out_channels: int = 0

    def __post_init__(self) -> None:
        for name in ("in_channels", "conditioning_channels", "num_heads", "head_width"):
            require_count(name, getattr(self, name), minimum=1)
        for name, default in (
            ("num_kv_heads", self.num_heads),
            ("mlp_width", 4 * self.num_heads * self.head_width),
            ("out_channels", self.in_channels),
        ):
            require_count(name, getattr(self, name), minimum=0)
            object.__setattr__(self, name, getattr(self, name) or default)
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} for {self.num_heads} heads"
            )
        object.__setattr__(self, "rope_axes", tuple(self.rope_axes))
        if any(width <= 0 or width % 2 for width in self.rope_axes) or sum(self.rope_axes) != self.head_width:
            raise ConfigurationError(
                f"rope_axes must be even, positive and sum to head_width = {self.head_width}, got {self.rope_axes}"
            )
        if not self.rope_theta > 1:
            raise ConfigurationError(f"rope_theta must be above 1, got {self.rope_theta!r}")

    @property
    def width(self) -> int:
        """Channels of a token inside the model."""
        return self.num_heads * self.head_width


@dataclass(frozen=True, slots=True, kw_only=True)
class DiTConfig(TransformerConfig):
    """A DiT; its SwiGLU has three matrices, so ``mlp_width`` 0 means 8/3 · width, rounded up to a multiple of 8.

    Attributes:
        num_blocks: transformer blocks.
    """

    num_blocks: int

    def __post_init__(self) -> None:
        if self.mlp_width == 0:
            object.__setattr__(self, "mlp_width", -(-self.num_heads * self.head_width * 8 // 24) * 8)
        TransformerConfig.__post_init__(self)
        require_count("num_blocks", self.num_blocks, minimum=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MMDiTConfig(TransformerConfig):
    """An MMDiT of FLUX.1's structure.

    Attributes:
        text_channels: channels of a text token.
        num_double_blocks: blocks in which text and visual tokens have their own weights.
        num_single_blocks: blocks that treat all tokens alike. With none, the last double block leaves text as it is.
    """

    text_channels: int
    num_double_blocks: int
    num_single_blocks: int

    def __post_init__(self) -> None:
        TransformerConfig.__post_init__(self)
        require_count("text_channels", self.text_channels, minimum=1)
        require_count("num_double_blocks", self.num_double_blocks, minimum=0)
        require_count("num_single_blocks", self.num_single_blocks, minimum=0)
        if self.num_double_blocks + self.num_single_blocks == 0:
            raise ConfigurationError("num_double_blocks + num_single_blocks must be at least 1, got 0")


def require_count(name: str, value: object, *, minimum: int) -> None:
    """Raise ``ConfigurationError`` unless ``value`` is an integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{name} must be an integer of at least {minimum}, got {value!r}")


DIT_PRESETS = {
    "dit-s": DiTConfig(
        in_channels=16, conditioning_channels=384, num_heads=6, head_width=64, rope_axes=(16, 24, 24), num_blocks=12
    ),
    "dit-xl": DiTConfig(
        in_channels=16, conditioning_channels=1152, num_heads=16, head_width=72, rope_axes=(16, 28, 28), num_blocks=28
    ),
}
"""Shapes of DiT-S and DiT-XL (arXiv 2212.09748) with three rotary axes."""

MMDIT_PRESETS = {
    "tiny": MMDiTConfig(
        in_channels=64,
        text_channels=64,
        conditioning_channels=64,
        num_heads=4,
        head_width=32,
        rope_axes=(8, 12, 12),
        num_double_blocks=2,
        num_single_blocks=2,
    ),
    "flux.1-dev": MMDiTConfig(
        in_channels=64,
        text_channels=4096,
        conditioning_channels=768,
        num_heads=24,
        head_width=128,
        rope_axes=(16, 56, 56),
        num_double_blocks=19,
        num_single_blocks=38,
    ),
}
"""The shape of FLUX.1-dev, and one that trains on a laptop."""
