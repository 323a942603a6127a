"""Shapes of known models: tokens per sample, and what a layer costs per token and per query-key pair.

Read from the models' public configurations. The FLOPs are those of the matrix products of one block; what depends on
the sequence alone (modulation, the text's key and value projections in cross-attention) and the input and output layers
are left out, and so are blocks that see text only.
"""

from __future__ import annotations

from dataclasses import dataclass

from knapformer.errors import ConfigurationError

DEMO_HEADS, DEMO_HEAD_WIDTH = 7, 16
"""Of the model that ``knapformer demo`` trains. Seven heads, because the heads of real models (12, 24, 30, 38) seldom
divide by the ranks that a long sequence needs either. Narrow ones with a long video leave a CPU much to compute for
each byte, as GPUs with fast links have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """One model's blocks, averaged over its layers.

    Attributes:
        width: channels of a visual token.
        num_heads: attention (query) heads.
        head_width: channels of a head.
        num_layers: transformer blocks that see the visual tokens.
        num_kv_heads: key and value heads; 0 means num_heads.
        mlp_width: inner channels of the MLP; 0 means 4 · width.
        mlp_matrices: 2, or 3 for SwiGLU.
        joint: text tokens are part of the sequence; otherwise the model reads them by cross-attention.
        max_text_tokens: longest text, all encoders together. A cross-attention model's blocks are counted as reading
            that much, because these models pad their text.
        pixels_per_token: pixels per side of a visual token (VAE × patch).
        temporal_rate: frames per latent frame of the causal video VAE after the first; 1 for image models.
        stream_multiple: each stream of a sequence is padded to a multiple of this.
        position: how positions are encoded, with rotary axes where there are any.
        parameters: of the transformer, as its publisher rounds them; 0 where they are not known.
    """

    width: int
    num_heads: int
    head_width: int
    num_layers: int
    num_kv_heads: int = 0
    mlp_width: int = 0
    mlp_matrices: int = 2
    joint: bool = True
    max_text_tokens: int = 512
    pixels_per_token: int = 16
    temporal_rate: int = 1
    stream_multiple: int = 1
    position: str = ""
    parameters: float = 0.0

    @property
    def attention_width(self) -> int:
        """Channels of all query heads."""
        return self.num_heads * self.head_width

    @property
    def linear_flops_per_token(self) -> float:
        """Token-wise work of a layer's forward pass: qkv, output, MLP and, per visual token, cross-attention."""
        attention, kv = self.attention_width, (self.num_kv_heads or self.num_heads) * self.head_width
        products = self.width * (2 * attention + 2 * kv) + self.mlp_matrices * self.width * (
            self.mlp_width or 4 * self.width
        )
        if not self.joint:
            products += 2 * self.width * attention + 2 * attention * self.max_text_tokens
        return 2.0 * products

    @property
    def attention_flops_per_pair(self) -> float:
        """Scores and weighted sum of one query and one key, over all heads."""
        return 4.0 * self.attention_width

    def visual_tokens(self, height: int, width: int, frames: int = 1) -> int:
        """Tokens of an image (one frame) or a video, before padding.

        Raises:
            ConfigurationError: a size is not an integer above 0.
        """
        for name, value in (("height", height), ("width", width), ("frames", frames)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name} must be an integer above 0, got {value!r}")
        sides = -(-height // self.pixels_per_token) * -(-width // self.pixels_per_token)
        return sides * ((frames - 1) // self.temporal_rate + 1)

    def tokens(self, height: int, width: int, frames: int = 1, text_tokens: int = 0) -> int:
        """Length of a sample's sequence: its visual tokens and, in a joint model, its text.

        Raises:
            ConfigurationError: a size is not an integer above 0, or the text is no count or too long for the model.
        """
        if isinstance(text_tokens, bool) or not isinstance(text_tokens, int) or text_tokens < 0:
            raise ConfigurationError(f"text_tokens must be an integer of at least 0, got {text_tokens!r}")
        if text_tokens > self.max_text_tokens:
            raise ConfigurationError(f"text_tokens must be at most {self.max_text_tokens}, got {text_tokens}")
        streams = [self.visual_tokens(height, width, frames), text_tokens if self.joint else 0]
        return sum(-(-stream // self.stream_multiple) * self.stream_multiple for stream in streams)


_ROPE_FLUX = "RoPE 16/56/56"
_ROPE_FLUX_2 = "RoPE 32/32/32/32, θ 2000"
_ROPE_HUNYUAN = "RoPE 16/56/56, θ 256"
_ROPE_WAN = "RoPE 44/42/42"
_SINCOS = "sine-cosine"


def _flux_2(num_heads: int, num_layers: int, parameters: float) -> ModelShape:
    width = num_heads * 128
    return ModelShape(
        width=width,
        num_heads=num_heads,
        head_width=128,
        num_layers=num_layers,
        mlp_width=3 * width,
        mlp_matrices=3,
        position=_ROPE_FLUX_2,
        parameters=parameters,
    )


def _wan(num_heads: int, num_layers: int, mlp_width: int, parameters: float, pixels_per_token: int = 16) -> ModelShape:
    return ModelShape(
        width=num_heads * 128,
        num_heads=num_heads,
        head_width=128,
        num_layers=num_layers,
        mlp_width=mlp_width,
        joint=False,
        pixels_per_token=pixels_per_token,
        temporal_rate=4,
        position=_ROPE_WAN,
        parameters=parameters,
    )


def _ltx(num_layers: int, head_width: int, parameters: float) -> ModelShape:
    return ModelShape(
        width=32 * head_width,
        num_heads=32,
        head_width=head_width,
        num_layers=num_layers,
        joint=False,
        max_text_tokens=128,
        pixels_per_token=32,
        temporal_rate=8,
        position="RoPE over time, height, width",
        parameters=parameters,
    )


MODEL_SHAPES: dict[str, ModelShape] = {
    "flux.1-dev": ModelShape(
        width=3072,
        num_heads=24,
        head_width=128,
        num_layers=19 + 38,
        position=_ROPE_FLUX,
        parameters=11.9e9,
    ),
    "flux.2-dev": _flux_2(48, 8 + 48, 32e9),
    "flux.2-klein-4b": _flux_2(24, 5 + 20, 4e9),
    "flux.2-klein-9b": _flux_2(32, 8 + 24, 9e9),
    "sd3.5-large": ModelShape(
        width=2432,
        num_heads=38,
        head_width=64,
        num_layers=38,
        max_text_tokens=77 + 256,
        position=_SINCOS,
        parameters=8.1e9,
    ),
    "pixart-sigma": ModelShape(
        width=1152,
        num_heads=16,
        head_width=72,
        num_layers=28,
        joint=False,
        max_text_tokens=300,
        position=_SINCOS,
        parameters=0.6e9,
    ),
    "hunyuanvideo": ModelShape(
        width=3072,
        num_heads=24,
        head_width=128,
        num_layers=20 + 40,
        max_text_tokens=256,
        temporal_rate=4,
        position=_ROPE_HUNYUAN,
        parameters=13e9,
    ),
    "hunyuanvideo-1.5": ModelShape(
        width=2048,
        num_heads=16,
        head_width=128,
        num_layers=54,
        max_text_tokens=1000 + 256,
        temporal_rate=4,
        position=_ROPE_HUNYUAN,
        parameters=8.3e9,
    ),
    "wan2.1-1.3b": _wan(12, 30, 8960, 1.3e9),
    "wan2.1-14b": _wan(40, 40, 13824, 14e9),
    "wan2.2-a14b": _wan(40, 40, 13824, 14e9),
    "wan2.2-ti2v-5b": _wan(24, 30, 14336, 5e9, pixels_per_token=32),
    "cogvideox-2b": ModelShape(
        width=1920,
        num_heads=30,
        head_width=64,
        num_layers=30,
        max_text_tokens=226,
        temporal_rate=4,
        position=_SINCOS,
        parameters=2e9,
    ),
    "cogvideox-5b": ModelShape(
        width=3072,
        num_heads=48,
        head_width=64,
        num_layers=42,
        max_text_tokens=226,
        temporal_rate=4,
        position="RoPE",
        parameters=5e9,
    ),
    "ltx-video-2b": _ltx(28, 64, 2e9),
    "ltx-video-13b": _ltx(48, 128, 13e9),
    "mochi-1": ModelShape(
        width=3072,
        num_heads=24,
        head_width=128,
        num_layers=48,
        mlp_width=8192,
        mlp_matrices=3,
        max_text_tokens=256,
        temporal_rate=6,
        position="learned RoPE",
        parameters=10e9,
    ),
    "qwen-image": ModelShape(
        width=3072,
        num_heads=24,
        head_width=128,
        num_layers=60,
        position=_ROPE_FLUX,
        parameters=20e9,
    ),
    "lumina-2": ModelShape(
        width=2304,
        num_heads=24,
        head_width=96,
        num_layers=26 + 2,
        num_kv_heads=8,
        mlp_width=9216,
        mlp_matrices=3,
        max_text_tokens=256,
        position="RoPE 32/32/32",
        parameters=2.6e9,
    ),
    "z-image": ModelShape(
        width=3840,
        num_heads=30,
        head_width=128,
        num_layers=30 + 2,
        mlp_width=10240,
        mlp_matrices=3,
        stream_multiple=32,
        position="RoPE 32/48/48",
        parameters=6e9,
    ),
    "open-sora-2.0": ModelShape(
        width=3072,
        num_heads=24,
        head_width=128,
        num_layers=19 + 38,
        temporal_rate=4,
        position=_ROPE_FLUX,
        parameters=11e9,
    ),
}
"""By name. Mochi-1's text stream is half as wide as its visual one; here its text tokens cost as much as visual ones.
Lumina 2 and Z-Image have two refining blocks for visual tokens, counted as layers, and two for text, left out.
Wan 2.2 A14B's parameters are those of one of its two experts."""


DEMO = "demo"
"""The model that ``knapformer demo`` trains: known to calibrate and replay, which run a stand-in of their own."""


def stand_in_shape(*, num_heads: int, head_width: int, num_layers: int) -> ModelShape:
    """The MMDiT of the demo and of stand-ins: plain blocks with MLP ratio 4."""
    return ModelShape(width=num_heads * head_width, num_heads=num_heads, head_width=head_width, num_layers=num_layers)


def named_shape(name: str) -> ModelShape:
    """``model_shape``, and the demo's with one block of each kind.

    Raises:
        ConfigurationError: listing the known names.
    """
    if name == DEMO:
        return stand_in_shape(num_heads=DEMO_HEADS, head_width=DEMO_HEAD_WIDTH, num_layers=2)
    return model_shape(name)


def model_shape(name: str) -> ModelShape:
    """The shape of a known model, whatever the case of its name.

    Raises:
        ConfigurationError: listing the known names.
    """
    shape = MODEL_SHAPES.get(name.lower())
    if shape is None:
        raise ConfigurationError(f"unknown model {name!r}; known: {', '.join(sorted(MODEL_SHAPES))}")
    return shape
