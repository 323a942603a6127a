"""A multimodal DiT of FLUX.1's structure on packed tokens: double-stream blocks, then single-stream blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from knapformer.execution.compiling import any_number_of_rows
from knapformer.execution.rows import RowIndex, add_gated, modulate
from knapformer.models.config import MMDiTConfig
from knapformer.models.lanes import Projected, cut, in_turns, join, lanes_of
from knapformer.models.layers import (
    Attention,
    GeluMLP,
    HeadNorm,
    Modulation,
    OutputLayer,
    VectorEmbedder,
    initialize,
    layer_norm,
)
from knapformer.models.rope import rotations
from knapformer.streams import StreamIndex

Tensors = tuple[Tensor, ...]
"""One of each lane. A compiled block takes tuples and lists for different things."""


class TokenIndex(NamedTuple):
    """Token to row of the conditioning, in each of the three orders: (T_text,), (T_visual,), (T,)."""

    text: RowIndex
    visual: RowIndex
    packed: RowIndex


class Place(NamedTuple):
    """Where a lane's tokens are: rows of the conditioning, streams, rotation (T, D/2), and who attends to whom."""

    rows: TokenIndex
    streams: StreamIndex
    rotation: Tensor
    attention: Any


class StreamLayers(nn.Module):
    """One stream's own weights in a double-stream block.

    With ``update=False`` the stream is only attended to: it has no output, and so no weights after attention.
    """

    def __init__(self, config: MMDiTConfig, *, update: bool = True) -> None:
        super().__init__()
        width = config.width
        self.update = update
        self.modulation = Modulation(width, 6 if update else 2)
        self.head_norm = HeadNorm(config.num_heads, config.num_kv_heads, config.head_width)
        self.qkv = nn.Linear(width, self.head_norm.num_channels)
        if update:
            self.attention_out = nn.Linear(width, width)
            self.mlp = GeluMLP(width, config.mlp_width)

    def project(self, x: Tensor, modulation: tuple[Tensor, ...], index: RowIndex) -> tuple[Tensor, Tensor, Tensor]:
        """x (T_s, width) to its q, k, v."""
        shift, scale = modulation[:2]
        heads: tuple[Tensor, Tensor, Tensor] = self.head_norm(self.qkv(modulate(layer_norm(x), shift, scale, index)))
        return heads

    def finish(self, x: Tensor, attended: Tensor, modulation: tuple[Tensor, ...], index: RowIndex) -> Tensor:
        """x and attended (T_s, width) to the stream's output (T_s, width)."""
        if not self.update:
            return x
        _, _, gate_1, shift, scale, gate_2 = modulation
        x = add_gated(x, self.attention_out(attended), gate_1, index)
        return add_gated(x, self.mlp(modulate(layer_norm(x), shift, scale, index)), gate_2, index)


class DoubleBlock(nn.Module):
    """Text and visual tokens with weights of their own, and one attention over both."""

    def __init__(self, config: MMDiTConfig, *, update_text: bool = True) -> None:
        super().__init__()
        self.text = StreamLayers(config, update=update_text)
        self.visual = StreamLayers(config)

    def forward(
        self, texts: Tensors, visuals: Tensors, conditioning: Tensor, places: Sequence[Place]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Texts (T_text, width) and visuals (T_visual, width) of each lane, conditioning (S, width), to both."""
        text_modulation, visual_modulation = self.text.modulation(conditioning), self.visual.modulation(conditioning)

        def before(i: int) -> Projected:
            rows, streams = places[i].rows, places[i].streams
            text_qkv = self.text.project(texts[i], text_modulation, rows.text)
            visual_qkv = self.visual.project(visuals[i], visual_modulation, rows.visual)
            return Projected(*map(streams.merge, text_qkv, visual_qkv))  # both attend in packed order

        def after(i: int, attended: Tensor, _kept: None) -> tuple[Tensor, Tensor]:
            rows = places[i].rows
            attended_text, attended_visual = places[i].streams.split(attended)
            text = self.text.finish(texts[i], attended_text, text_modulation, rows.text)
            visual = self.visual.finish(visuals[i], attended_visual, visual_modulation, rows.visual)
            return text, visual

        text, visual = zip(*in_turns(places, before, after), strict=True)
        return text, visual


class SingleBlock(nn.Module):
    """All tokens alike: attention and MLP in parallel, from one projection and into one (arXiv 2302.05442)."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.width
        self.modulation = Modulation(width, 3)
        self.head_norm = HeadNorm(config.num_heads, config.num_kv_heads, config.head_width)
        self.split_widths = [self.head_norm.num_channels, config.mlp_width]
        self.in_layer = nn.Linear(width, sum(self.split_widths))
        self.out_layer = nn.Linear(width + config.mlp_width, width)

    def forward(self, lanes: Tensors, conditioning: Tensor, places: Sequence[Place]) -> tuple[Tensor, ...]:
        """Rows (T, width) of each lane in packed order, conditioning (S, width), to (T, width) of each lane."""
        shift, scale, gate = self.modulation(conditioning)

        def before(i: int) -> Projected:
            projected = self.in_layer(modulate(layer_norm(lanes[i]), shift, scale, places[i].rows.packed))
            qkv, mlp = projected.split(self.split_widths, dim=-1)
            q, k, v = self.head_norm(qkv)
            return Projected(q, k, v, mlp)

        def after(i: int, attended: Tensor, mlp: Tensor) -> Tensor:
            update = self.out_layer(torch.cat([attended, functional.gelu(mlp, approximate="tanh")], dim=-1))
            return add_gated(lanes[i], update, gate, places[i].rows.packed)

        return tuple(in_turns(places, before, after))


class MMDiT(nn.Module):
    """The model. Every path runs with zero rows of either stream or of both, so no rank needs a special case."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        self.text_in = nn.Linear(config.text_channels, config.width)
        self.visual_in = nn.Linear(config.in_channels, config.width)
        self.conditioning_in = VectorEmbedder(config.conditioning_channels, config.width)
        last_double = config.num_double_blocks - 1 if config.num_single_blocks == 0 else None
        self.double_blocks = nn.ModuleList(
            DoubleBlock(config, update_text=i != last_double) for i in range(config.num_double_blocks)
        )
        self.single_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.num_single_blocks))
        self.output = OutputLayer(config.width, config.out_channels)
        self.reset_parameters()

    @property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks in order."""
        return [*self.double_blocks, *self.single_blocks]

    def reset_parameters(self, *, init_std: float | None = None) -> None:
        """See ``knapformer.models.layers.initialize``."""
        initialize(self, init_std=init_std)

    def forward(
        self,
        visual: Tensor,
        text: Tensor,
        position_ids: Tensor,
        conditioning: Tensor,
        sequence_index: Tensor | RowIndex,
        streams: StreamIndex,
        *,
        attention: Attention,
    ) -> Tensor:
        """Predict an output for every visual token.

        Args:
            visual: (T_visual, in_channels).
            text: (T_text, text_channels).
            position_ids: (T, num_axes) int64, in packed order (text first inside each sequence).
            conditioning: (S, conditioning_channels), a row per local sequence.
            sequence_index: (T,) int64 in packed order, token to row of ``conditioning``; as a ``RowIndex``
                (``Step.row_index``) where the tokens of a row lie together, which saves copies.
            streams: which packed rows are text and which are visual.
            attention: see ``knapformer.models.layers.Attention``; it sees tokens in packed order.

        Returns:
            (T_visual, out_channels).
        """
        config = self.config
        rotation = rotations(position_ids, config.rope_axes, theta=config.rope_theta, dtype=visual.dtype)
        rows = sequence_index if isinstance(sequence_index, RowIndex) else RowIndex(sequence_index)
        attentions, counts = lanes_of(attention, rotation.shape[0])
        places = _places(rows.parts(counts), streams.parts(counts), rotation.split(counts), attentions)
        texts: Tensors = cut(self.text_in(text), [len(place.streams.text) for place in places])
        visuals: Tensors = cut(self.visual_in(visual), [len(place.streams.visual) for place in places])
        conditioning = self.conditioning_in(conditioning)
        with any_number_of_rows():
            for block in self.double_blocks:
                texts, visuals = block(texts, visuals, conditioning, places)
        if config.num_single_blocks:
            packed = tuple(place.streams.merge(*x) for place, *x in zip(places, texts, visuals, strict=True))
            with any_number_of_rows():
                for block in self.single_blocks:
                    packed = block(packed, conditioning, places)
            visuals = tuple(place.streams.split(x)[1] for place, x in zip(places, packed, strict=True))
        return join(
            [self.output(layer_norm(x), conditioning, p.rows.visual) for x, p in zip(visuals, places, strict=True)]
        )


def _places(
    rows: list[RowIndex], streams: list[StreamIndex], rotations: Tensors, attentions: Sequence[Any]
) -> list[Place]:
    return [
        Place(TokenIndex(*of_streams.split_rows(own), own), of_streams, rotation, attention)
        for own, of_streams, rotation, attention in zip(rows, streams, rotations, attentions, strict=True)
    ]
