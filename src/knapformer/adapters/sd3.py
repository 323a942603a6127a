"""SD3Transformer2DModel (Stable Diffusion 3 and 3.5): text and image tokens in joint blocks, sine-cosine positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.embeddings import PatchEmbed
from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZero, SD35AdaLayerNormZeroX
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from torch import Tensor, nn

from knapformer.adapters import layers
from knapformer.adapters.family import Family, Layer, layer_cost
from knapformer.adapters.flux import ADA_MEMBERS, DOUBLE_MEMBERS, JOINT_MEMBERS
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
from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.local_attention import LocalAttention
from knapformer.execution.operator import in_order
from knapformer.execution.rows import add_gated
from knapformer.given.cost import CostModel


def pack(
    model: Any,
    keep_padding: bool,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    pooled_projections: Any = None,
    timestep: Any = None,
    *,
    encoder_attention_mask: Any = None,
) -> Batch:
    """Per sample: hidden_states (C, H, W), encoder_hidden_states (L_text, joint_attention_dim), pooled_projections
    (S, P), timestep (S,)."""
    dtype, device, config = float_dtype(model), device_of(model), model.config
    latents = samples("hidden_states", hidden_states, 3, "(C, H, W)")
    text = samples("encoder_hidden_states", encoder_hidden_states, 2, "(L_text, C)", len(latents))
    text = real_text(text, encoder_attention_mask, keep_padding)
    patch = (config.patch_size, config.patch_size)
    grids = [[size // config.patch_size for size in x.shape[1:]] for x in latents]
    patches = [patchify(x, patch, f"hidden_states[{i}]").flatten(1) for i, x in enumerate(latents)]
    wide = torch.promote_types(dtype, torch.float32)
    times = stack_vectors("timestep", timestep, len(latents), 1, wide, device)
    pooled_width = config.pooled_projection_dim
    pooled = stack_vectors("pooled_projections", pooled_projections, len(latents), pooled_width, wide, device)
    return Batch(
        {"text": [len(part) for part in text], "visual": [math.prod(grid) for grid in grids]},
        {
            "visual": stack_rows("hidden_states", patches, config.in_channels * math.prod(patch), dtype, device),
            "position": _positions(grids, config.pos_embed_max_size, device),
            "text": stack_rows("encoder_hidden_states", text, config.joint_attention_dim, dtype, device),
            "vectors": torch.cat([times, pooled], dim=1),
        },
        lambda rows: _unpatchify(rows, grids, config.patch_size),
    )


def _positions(grids: Sequence[Sequence[int]], size: int, device: torch.device) -> Tensor:
    """(T, 1) each token's row in the model's table of size × size positions, of which a sample uses the middle."""
    found = [torch.empty(0, 1, dtype=torch.int64, device=device)]
    for i, (height, width) in enumerate(grids):
        if max(height, width) > size:
            raise LengthsError(f"hidden_states[{i}]: {height} × {width} tokens, the model has {size} positions a side")
        row, column = grid_ids((height, width), device).unbind(1)
        position = (row + (size - height) // 2) * size + column + (size - width) // 2
        found.append(position.unsqueeze(1))
    return torch.cat(found)


def _unpatchify(rows: Tensor, grids: Sequence[Sequence[int]], patch: int) -> list[Tensor]:
    """(T_home, patch² · C) to (C, H, W) per sample."""
    parts = rows.split([math.prod(grid) for grid in grids])
    shaped = [
        part.reshape(*grid, patch, patch, rows.shape[1] // patch**2) for part, grid in zip(parts, grids, strict=True)
    ]
    return [x.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2) for x in shaped]


def compute(model: Any, batch: Batch, step: Any) -> Tensor:
    """The model on packed tokens: (T_visual, patch² · out_channels)."""
    tensors, config = batch.tensors, model.config
    routed = step.route_batch(
        streams={"visual": (tensors["visual"], tensors["position"]), "text": [tensors["text"]]},
        conditioning=[tensors["vectors"]],
    )
    (patches, position), (text,) = routed.streams["visual"], routed.streams["text"]
    (vectors,) = routed.conditioning
    packed = Packed(step)
    if config.dual_attention_layers and not step.plan.is_split.any():
        packed.visual_attention = LocalAttention(packed.visual.counts)
    patch = (config.in_channels, config.patch_size, config.patch_size)
    visual = model.pos_embed(patches.unflatten(1, patch), position.squeeze(1))
    temb = model.time_text_embed(vectors[:, 0], vectors[:, 1:].to(patches.dtype))
    text = model.context_embedder(text)
    for block in model.transformer_blocks:
        text, visual = run_block(model, block, visual, text, temb, packed)
    out: Tensor = model.proj_out(model.norm_out(visual, temb, packed.visual))
    return out


def embed_patches(self: Any, patches: Tensor, position: Tensor) -> Tensor:
    """PatchEmbed on single patches (T, C, p, p) at rows of its position table."""
    x = self.proj(patches).flatten(1)
    placed: Tensor = (x + self.pos_embed[0].index_select(0, position)).to(x.dtype)
    return placed


def block(self: Any, visual: Tensor, text: Tensor, temb: Tensor, packed: Packed) -> tuple[Tensor | None, Tensor]:
    """JointTransformerBlock: (T_visual, C) and (T_text, C) to (text, or None from the last block; visual)."""
    visual_in, gate, *rest = self.norm1(visual, temb, packed.visual)
    mlp, dual = tuple(rest[:3]), rest[3:]
    normed_text = self.norm1_context(text, temb, packed.text)
    text_in, *text_rest = [normed_text] if self.context_pre_only else normed_text
    visual_out, text_out = self.attn(visual_in, text_in, packed)
    visual = add_gated(visual, visual_out, gate, packed.visual)
    if dual:
        second = self.attn2(in_order(dual[0], visual_out), None, packed)
        visual = add_gated(visual, second, dual[1], packed.visual)
    visual = layers.feed_forward(visual, mlp, self.norm2, self.ff, packed.visual)
    if self.context_pre_only:
        return None, visual
    text = add_gated(text, text_out, text_rest[0], packed.text)
    text = layers.feed_forward(text, tuple(text_rest[1:]), self.norm2_context, self.ff_context, packed.text)
    return layers.clip_half(text), visual


def attention(self: Any, x: Tensor, text: Tensor | None, packed: Packed) -> Any:
    """Attention: joint with text, or among the visual tokens alone (SD 3.5's second attention)."""
    if text is None:
        return layers.visual_attention(self, x, packed)
    return layers.attention(self, x, text, packed)


def cost(config: Any) -> CostModel:
    """Cost of a block; the second attention of some blocks is spread over all."""
    width = config.num_attention_heads * config.attention_head_dim
    dual = len(config.dual_attention_layers) / config.num_layers
    return layer_cost(config, config.num_layers, (24.0 + 8.0 * dual) * width**2, 1.0 + dual)


def check(model: Any) -> None:
    if model.config.pos_embed_max_size is None:
        raise ConfigurationError("no adapter for SD3 without pos_embed_max_size")


FAMILY = Family(
    model=SD3Transformer2DModel,
    layers=(
        Layer(JointTransformerBlock, block, (*DOUBLE_MEMBERS, "attn2", "context_pre_only", "use_dual_attention")),
        Layer(Attention, attention, JOINT_MEMBERS),
        Layer(PatchEmbed, embed_patches, ("proj", "pos_embed")),
        Layer(nn.Conv2d, layers.patch_convolution, ("weight", "bias")),
        Layer(AdaLayerNormZero, layers.ada_zero, ADA_MEMBERS),
        Layer(SD35AdaLayerNormZeroX, layers.ada_zero_dual, ADA_MEMBERS),
        Layer(AdaLayerNormContinuous, layers.ada_continuous, ADA_MEMBERS),
    ),
    members=(
        "pos_embed",
        "time_text_embed",
        "context_embedder",
        "transformer_blocks",
        "norm_out",
        "proj_out",
    ),
    sources=(PatchEmbed.cropped_pos_embed,),
    processors=(JointAttnProcessor2_0,),
    pack=pack,
    compute=compute,
    cost=cost,
    stream="visual",
    attends_to_padding=True,
    check=check,
)
