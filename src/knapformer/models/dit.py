"""A Diffusion Transformer on packed tokens (arXiv 2212.09748), with RMS norms, QK-norm, RoPE and SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from knapformer.execution.compiling import any_number_of_rows
from knapformer.execution.rows import RowIndex, add_gated, modulate
from knapformer.models.config import DiTConfig
from knapformer.models.lanes import Projected, cut, in_turns, join, lanes_of
from knapformer.models.layers import (
    Attention,
    HeadNorm,
    Modulation,
    OutputLayer,
    SwiGLU,
    VectorEmbedder,
    initialize,
    rms_norm,
)
from knapformer.models.rope import rotations


class Place(NamedTuple):
    """Where a lane's tokens are: rows of the conditioning (T,), rotation (T, D/2), and who attends to whom."""

    rows: RowIndex
    rotation: Tensor
    attention: Any


class DiTBlock(nn.Module):
    """Attention, then SwiGLU, each on a modulated RMS norm and behind a gate."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        width = config.width
        self.modulation = Modulation(width, 6)
        self.head_norm = HeadNorm(config.num_heads, config.num_kv_heads, config.head_width)
        self.qkv = nn.Linear(width, self.head_norm.num_channels, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp = SwiGLU(width, config.mlp_width)

    def forward(self, lanes: Sequence[Tensor], conditioning: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        """Rows (T, width) of each lane, conditioning (S, width), places of the lanes, to (T, width) of each lane."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(conditioning)

        def before(i: int) -> Projected:
            normed = modulate(rms_norm(lanes[i]), shift_1, scale_1, places[i].rows)
            return Projected(*self.head_norm(self.qkv(normed)))

        def after(i: int, attended: Tensor, _kept: None) -> Tensor:
            rows = places[i].rows
            x = add_gated(lanes[i], self.attention_out(attended), gate_1, rows)
            return add_gated(x, self.mlp(modulate(rms_norm(x), shift_2, scale_2, rows)), gate_2, rows)

        return tuple(in_turns(places, before, after))


class DiT(nn.Module):
    """The model. Every path runs with zero rows, so a rank without tokens needs no special case."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.visual_in = nn.Linear(config.in_channels, config.width)
        self.conditioning_in = VectorEmbedder(config.conditioning_channels, config.width)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.num_blocks))
        self.output = OutputLayer(config.width, config.out_channels)
        self.reset_parameters()

    def reset_parameters(self, *, init_std: float | None = None) -> None:
        """See ``knapformer.models.layers.initialize``."""
        initialize(self, init_std=init_std)

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        conditioning: Tensor,
        sequence_index: Tensor | RowIndex,
        *,
        attention: Attention,
    ) -> Tensor:
        """Predict an output for every token.

        Args:
            x: (T, in_channels) packed tokens.
            position_ids: (T, num_axes) int64.
            conditioning: (S, conditioning_channels), a row per local sequence.
            sequence_index: (T,) int64, token to row of ``conditioning``; as a ``RowIndex`` (``Step.row_index``) where
                the tokens of a row lie together, which saves copies.
            attention: see ``knapformer.models.layers.Attention``.

        Returns:
            (T, out_channels).
        """
        config = self.config
        rotation = rotations(position_ids, config.rope_axes, theta=config.rope_theta, dtype=x.dtype)
        x, conditioning = self.visual_in(x), self.conditioning_in(conditioning)
        index = sequence_index if isinstance(sequence_index, RowIndex) else RowIndex(sequence_index)
        attentions, counts = lanes_of(attention, x.shape[0])
        places = list(map(Place, index.parts(counts), rotation.split(counts), attentions))
        lanes: Sequence[Tensor] = cut(x, counts)
        with any_number_of_rows():
            for block in self.blocks:
                lanes = block(lanes, conditioning, places)
        out: Tensor = self.output(rms_norm(join(lanes)), conditioning, index)
        return out
