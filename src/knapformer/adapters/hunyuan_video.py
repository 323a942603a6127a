"""HunyuanVideoTransformer3DModel: text, refined by its own small transformer, and latent tokens, as in FLUX.1.

The refiner works on text alone, of each sample by itself; it runs on the home rank, before tokens are routed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb, get_1d_rotary_pos_embed
from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_hunyuan_video import (
    HunyuanVideoAdaNorm,
    HunyuanVideoAttnProcessor2_0,
    HunyuanVideoConditionEmbedding,
    HunyuanVideoIndividualTokenRefiner,
    HunyuanVideoIndividualTokenRefinerBlock,
    HunyuanVideoPatchEmbed,
    HunyuanVideoRotaryPosEmbed,
    HunyuanVideoSingleTransformerBlock,
    HunyuanVideoTokenRefiner,
    HunyuanVideoTokenReplaceAdaLayerNormZero,
    HunyuanVideoTokenReplaceAdaLayerNormZeroSingle,
    HunyuanVideoTokenReplaceSingleTransformerBlock,
    HunyuanVideoTokenReplaceTransformerBlock,
    HunyuanVideoTransformer3DModel,
    HunyuanVideoTransformerBlock,
)
from torch import Tensor, nn

from knapformer.adapters import layers
from knapformer.adapters.family import Family, Layer, layer_cost
from knapformer.adapters.flux import ADA_MEMBERS, DOUBLE_MEMBERS, JOINT_MEMBERS, SINGLE_MEMBERS, double_block
from knapformer.adapters.packing import (
    Batch,
    Packed,
    device_of,
    float_dtype,
    grid_ids,
    patchify,
    real_text,
    run_block,
    samples,
    stack_rows,
    stack_vectors,
)
from knapformer.execution.devices import to_device
from knapformer.execution.local_attention import LocalAttention
from knapformer.execution.rows import RowIndex, add_gated, mean_by_row
from knapformer.given.cost import CostModel


def pack(
    model: Any,
    keep_padding: bool,
    hidden_states: Any,
    timestep: Any = None,
    encoder_hidden_states: Any = None,
    encoder_attention_mask: Any = None,
    pooled_projections: Any = None,
    guidance: Any = None,
) -> Batch:
    """Per sample: hidden_states (C, F, H, W), encoder_hidden_states (L_text, text_embed_dim), its mask (L_text,) or
    None; timestep (S,), pooled_projections (S, P), guidance (S,) if the model takes it."""
    dtype, device, config = float_dtype(model), device_of(model), model.config
    latents = samples("hidden_states", hidden_states, 4, "(C, F, H, W)")
    text = samples("encoder_hidden_states", encoder_hidden_states, 2, "(L_text, C)", len(latents))
    text = real_text(text, encoder_attention_mask, keep_padding)
    patch = (config.patch_size_t, config.patch_size, config.patch_size)
    grids = [[size // p for size, p in zip(x.shape[1:], patch, strict=True)] for x in latents]
    patches = [patchify(x, patch, f"hidden_states[{i}]").flatten(1) for i, x in enumerate(latents)]
    wide = torch.promote_types(dtype, torch.float32)
    scalars = [("timestep", timestep)] + ([("guidance", guidance)] if config.guidance_embeds else [])
    vectors = [stack_vectors(name, values, len(latents), 1, wide, device) for name, values in scalars]
    pooled_width = config.pooled_projection_dim
    vectors.append(stack_vectors("pooled_projections", pooled_projections, len(latents), pooled_width, wide, device))
    empty = torch.empty(0, 3, dtype=torch.int64, device=device)
    return Batch(
        {"text": [len(part) for part in text], "visual": [math.prod(grid) for grid in grids]},
        {
            "visual": stack_rows("hidden_states", patches, config.in_channels * math.prod(patch), dtype, device),
            "ids": torch.cat([empty, *(grid_ids(grid, device) for grid in grids)]),
            "text": stack_rows("encoder_hidden_states", text, config.text_embed_dim, dtype, device),
            "vectors": torch.cat(vectors, dim=1),
        },
        lambda rows: _unpatchify(rows, grids, patch),
    )


def _unpatchify(rows: Tensor, grids: Sequence[Sequence[int]], patch: Sequence[int]) -> list[Tensor]:
    """(T_home, C · patch) to (C, F, H, W) per sample."""
    parts = rows.split([math.prod(grid) for grid in grids])
    shaped = [
        part.reshape(*grid, rows.shape[1] // math.prod(patch), *patch) for part, grid in zip(parts, grids, strict=True)
    ]
    return [x.permute(3, 0, 4, 1, 5, 2, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2) for x in shaped]


def compute(model: Any, batch: Batch, step: Any) -> Tensor:
    """The model on packed tokens: (T_visual, patch · out_channels)."""
    tensors, config = batch.tensors, model.config
    text_rows = TextRows.of(batch.lengths["text"], tensors["text"].device)
    text = model.context_embedder(tensors["text"], tensors["vectors"][:, 0], text_rows)
    routed = step.route_batch(
        streams={"text": [text], "visual": (tensors["visual"], tensors["ids"])}, conditioning=[tensors["vectors"]]
    )
    (text,), (patches, ids) = routed.streams["text"], routed.streams["visual"]
    (vectors,) = routed.conditioning
    packed = Packed(step)
    packed.rotate = _rotation(model.rope, ids, packed)
    own, temb = packed.visual, _condition(model, vectors, patches.dtype)
    if config.image_condition_type == "token_replace":
        # Tokens of the first frame are modulated as if they were free of noise: rows S … 2 S are for them.
        packed.visual = RowIndex(packed.visual.rows + packed.num_sequences * (ids[:, 0] == 0))
        packed.index = RowIndex(packed.merge(packed.text.rows, packed.visual.rows))
    patch = (config.in_channels, config.patch_size_t, config.patch_size, config.patch_size)
    visual = model.x_embedder(patches.unflatten(1, patch)).flatten(1)
    for block in model.transformer_blocks:
        text, visual = run_block(model, block, visual, text, temb, packed)
    tokens = packed.merge(text, visual)
    for block in model.single_transformer_blocks:
        tokens = run_block(model, block, tokens, temb, packed)
    visual = packed.split(tokens)[1]
    out: Tensor = model.proj_out(model.norm_out(visual, temb[: packed.num_sequences], own))
    return out


def _condition(model: Any, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """(S, …) timestep, guidance if the model has it, and pooled text, to (S, width), or (2 S, width)."""
    num_scalars = 2 if model.config.guidance_embeds else 1
    guidance = vectors[:, 1] if model.config.guidance_embeds else None
    temb, first_frame = model.time_text_embed(vectors[:, 0], vectors[:, num_scalars:].to(dtype), guidance)
    both: Tensor = temb if first_frame is None else torch.cat([temb, first_frame])
    return both


def _rotation(rope: Any, ids: Tensor, packed: Packed) -> Any:
    """Rotate the latent tokens by (frame, row, column); text tokens stay as they are."""
    positions: Any = ids.float().unbind(1)
    axes = zip(rope.rope_dim, positions, strict=True)
    tables = [get_1d_rotary_pos_embed(width, position, rope.theta, use_real=True) for width, position in axes]
    cos, sin = (torch.cat([table[i] for table in tables], dim=1) for i in (0, 1))
    num_text = packed.text.rows.shape[0]
    still = (cos.new_ones(num_text, cos.shape[1]), sin.new_zeros(num_text, sin.shape[1]))
    return layers.rotation(packed.merge(still[0], cos), packed.merge(still[1], sin))


class TextRows(NamedTuple):
    """The text rows of this rank's samples: (T_text,) whose each is, (S,) how many each has, and their attention."""

    rows: RowIndex
    counts: Tensor
    attention: LocalAttention

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> TextRows:
        """Samples of so many rows."""
        counts = to_device(np.asarray(lengths, np.int64), device)
        return cls(RowIndex.from_counts(lengths, device=device), counts, LocalAttention(lengths))


def refine_text(self: Any, text: Tensor, timestep: Tensor, text_rows: TextRows) -> Tensor:
    """HunyuanVideoTokenRefiner on the text rows (T_text, C) of this rank's samples, with their timesteps (S,)."""
    pooled = mean_by_row(text, text_rows.rows, text_rows.counts)
    temb = self.time_text_embed(timestep, pooled.to(text.dtype))
    refined: Tensor = self.token_refiner(self.proj_in(text), temb, text_rows)
    return refined


def run_refiner(self: Any, x: Tensor, temb: Tensor, text_rows: TextRows) -> Tensor:
    """HunyuanVideoIndividualTokenRefiner."""
    for block in self.refiner_blocks:
        x = block(x, temb, text_rows)
    return x


def refiner_block(self: Any, x: Tensor, temb: Tensor, text_rows: TextRows) -> Tensor:
    """HunyuanVideoIndividualTokenRefinerBlock."""
    gate, mlp_gate = (part.squeeze(1) for part in self.norm_out(temb))
    x = add_gated(x, self.attn(self.norm1(x), None, text_rows), gate, text_rows.rows)
    return add_gated(x, self.ff(self.norm2(x)), mlp_gate, text_rows.rows)


def attention(self: Any, x: Tensor, text: Tensor | None, packed: Packed | TextRows) -> Any:
    """Attention of the blocks, or of the refiner, which passes text rows."""
    if isinstance(packed, Packed):
        return layers.attention(self, x, text, packed)
    q, k, v = layers.project(self, x)
    out = packed.attention(q.to(v.dtype), k.to(v.dtype), v).flatten(1)
    for layer in self.to_out:
        out = layer(out)
    return out


def single_block(self: Any, x: Tensor, temb: Tensor, packed: Packed) -> Tensor:
    """HunyuanVideoSingleTransformerBlock on (T, C) of all tokens."""
    normed, gate = self.norm(x, temb, packed.index)
    joined = torch.cat([self.attn(normed, None, packed), self.act_mlp(self.proj_mlp(normed))], dim=-1)
    return add_gated(x, self.proj_out(joined), gate, packed.index)


def cost(config: Any) -> CostModel:
    """Cost of a block from the model's configuration."""
    width = config.num_attention_heads * config.attention_head_dim
    per_token = (8.0 + 4.0 * config.mlp_ratio) * width**2
    return layer_cost(config, config.num_layers + config.num_single_layers, per_token)


FAMILY = Family(
    model=HunyuanVideoTransformer3DModel,
    layers=(
        Layer(HunyuanVideoTransformerBlock, double_block, DOUBLE_MEMBERS),
        Layer(HunyuanVideoTokenReplaceTransformerBlock, double_block, DOUBLE_MEMBERS),
        Layer(HunyuanVideoSingleTransformerBlock, single_block, SINGLE_MEMBERS),
        Layer(HunyuanVideoTokenReplaceSingleTransformerBlock, single_block, SINGLE_MEMBERS),
        Layer(HunyuanVideoTokenRefiner, refine_text, ("time_text_embed", "proj_in", "token_refiner")),
        Layer(HunyuanVideoIndividualTokenRefiner, run_refiner, ("refiner_blocks",)),
        Layer(HunyuanVideoIndividualTokenRefinerBlock, refiner_block, ("norm1", "attn", "norm2", "ff", "norm_out")),
        Layer(Attention, attention, JOINT_MEMBERS),
        Layer(AdaLayerNormZero, layers.ada_zero, ADA_MEMBERS),
        Layer(HunyuanVideoTokenReplaceAdaLayerNormZero, layers.ada_zero, ADA_MEMBERS),
        Layer(AdaLayerNormZeroSingle, layers.ada_single, ADA_MEMBERS),
        Layer(HunyuanVideoTokenReplaceAdaLayerNormZeroSingle, layers.ada_single, ADA_MEMBERS),
        Layer(AdaLayerNormContinuous, layers.ada_continuous, ADA_MEMBERS),
        Layer(nn.Conv3d, layers.patch_convolution, ("weight", "bias")),
    ),
    members=(
        "rope",
        "time_text_embed",
        "x_embedder",
        "context_embedder",
        "transformer_blocks",
        "single_transformer_blocks",
        "norm_out",
        "proj_out",
    ),
    sources=(
        HunyuanVideoRotaryPosEmbed.forward,
        HunyuanVideoPatchEmbed.forward,
        HunyuanVideoConditionEmbedding.forward,
        HunyuanVideoAdaNorm.forward,
        apply_rotary_emb,
        get_1d_rotary_pos_embed,
    ),
    processors=(HunyuanVideoAttnProcessor2_0, AttnProcessor2_0),
    pack=pack,
    compute=compute,
    cost=cost,
    stream="visual",
    attends_to_padding=False,
)
