"""FluxTransformer2DModel (FLUX.1): text and image tokens in double blocks, then in one stream."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormContinuous, AdaLayerNormZero, AdaLayerNormZeroSingle
from diffusers.models.transformers.transformer_flux import (
    FluxAttention,
    FluxAttnProcessor,
    FluxPosEmbed,
    FluxSingleTransformerBlock,
    FluxTransformer2DModel,
    FluxTransformerBlock,
)
from torch import Tensor

from knapformer.adapters import layers
from knapformer.adapters.family import Family, Layer, layer_cost
from knapformer.adapters.packing import (
    Batch,
    Packed,
    device_of,
    float_dtype,
    real_text,
    run_block,
    samples,
    stack_ids,
    stack_rows,
    stack_vectors,
)
from knapformer.execution.rows import add_gated
from knapformer.given.cost import CostModel


def pack(
    model: Any,
    keep_padding: bool,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    pooled_projections: Any = None,
    timestep: Any = None,
    img_ids: Any = None,
    txt_ids: Any = None,
    guidance: Any = None,
    *,
    encoder_attention_mask: Any = None,
) -> Batch:
    """Per sample: hidden_states (L, in_channels), encoder_hidden_states (L_text, joint_attention_dim), img_ids (L, 3)
    or one for all, txt_ids likewise or None for zeros; pooled_projections (S, P), timestep (S,), guidance (S,)."""
    dtype, device, config = float_dtype(model), device_of(model), model.config
    visual = samples("hidden_states", hidden_states, 2, "(L, C)")
    text = samples("encoder_hidden_states", encoder_hidden_states, 2, "(L_text, C)", len(visual))
    if txt_ids is None:
        txt_ids = [torch.zeros(len(part), 3, dtype=torch.int64) for part in text]
    text_ids = samples("txt_ids", txt_ids, 2, "(L_text, 3)", len(visual), is_shareable=True)
    visual_ids = samples("img_ids", img_ids, 2, "(L, 3)", len(visual), is_shareable=True)
    text, text_ids = (real_text(part, encoder_attention_mask, keep_padding) for part in (text, text_ids))
    wide = torch.promote_types(dtype, torch.float32)
    scalars = [("timestep", timestep)] + ([("guidance", guidance)] if config.guidance_embeds else [])
    vectors = [stack_vectors(name, values, len(visual), 1, wide, device) for name, values in scalars]
    pooled_width = config.pooled_projection_dim
    vectors.append(stack_vectors("pooled_projections", pooled_projections, len(visual), pooled_width, wide, device))
    lengths, text_lengths = ([len(part) for part in parts] for parts in (visual, text))
    return Batch(
        {"text": text_lengths, "visual": lengths},
        {
            "visual": stack_rows("hidden_states", visual, config.in_channels, dtype, device),
            "visual_ids": stack_ids("img_ids", visual_ids, 3, device, lengths, "hidden_states"),
            "text": stack_rows("encoder_hidden_states", text, config.joint_attention_dim, dtype, device),
            "text_ids": stack_ids("txt_ids", text_ids, 3, device, text_lengths, "encoder_hidden_states"),
            "vectors": torch.cat(vectors, dim=1),
        },
        lambda rows: list(rows.split(lengths)),
    )


def compute(model: Any, batch: Batch, step: Any) -> Tensor:
    """The model on packed tokens: (T_visual, out_channels)."""
    rows = batch.tensors
    routed = step.route_batch(
        streams={"visual": (rows["visual"], rows["visual_ids"]), "text": (rows["text"], rows["text_ids"])},
        conditioning=[rows["vectors"]],
    )
    (visual, visual_ids), (text, text_ids) = routed.streams["visual"], routed.streams["text"]
    visual, text = model.x_embedder(visual), model.context_embedder(text)
    temb = _condition(model, routed.conditioning[0], visual.dtype)

    packed = Packed(step)
    packed.rotate = layers.rotation(*model.pos_embed(packed.merge(text_ids, visual_ids)))
    for block in model.transformer_blocks:
        text, visual = run_block(model, block, visual, text, temb, packed)
    tokens = packed.merge(text, visual)
    for block in model.single_transformer_blocks:
        tokens = run_block(model, block, tokens, temb, packed)
    visual = packed.split(tokens)[1]
    out: Tensor = model.proj_out(model.norm_out(visual, temb, packed.visual))
    return out


def _condition(model: Any, vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """(S, …) timestep, guidance if the model has it, and pooled text, to (S, width)."""
    num_scalars = 2 if model.config.guidance_embeds else 1
    scalars = (vectors[:, i].to(dtype) * 1000 for i in range(num_scalars))
    temb: Tensor = model.time_text_embed(*scalars, vectors[:, num_scalars:].to(dtype))
    return temb


def double_block(self: Any, visual: Tensor, text: Tensor, temb: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """FluxTransformerBlock: (T_visual, C) and (T_text, C) to (text, visual)."""
    visual_in, gate, *visual_mlp = self.norm1(visual, temb, packed.visual)
    text_in, text_gate, *text_mlp = self.norm1_context(text, temb[: packed.num_sequences], packed.text)
    visual_out, text_out = self.attn(visual_in, text_in, packed)
    visual = add_gated(visual, visual_out, gate, packed.visual)
    visual = layers.feed_forward(visual, tuple(visual_mlp), self.norm2, self.ff, packed.visual)
    text = add_gated(text, text_out, text_gate, packed.text)
    text = layers.feed_forward(text, tuple(text_mlp), self.norm2_context, self.ff_context, packed.text)
    return layers.clip_half(text), visual


def single_block(self: Any, x: Tensor, temb: Tensor, packed: Packed) -> Tensor:
    """FluxSingleTransformerBlock on (T, C) of all tokens."""
    normed, gate = self.norm(x, temb, packed.index)
    joined = torch.cat([self.attn(normed, None, packed), self.act_mlp(self.proj_mlp(normed))], dim=-1)
    return layers.clip_half(add_gated(x, self.proj_out(joined), gate, packed.index))


def cost(config: Any) -> CostModel:
    """Cost of a block from the model's configuration."""
    width = config.num_attention_heads * config.attention_head_dim
    return layer_cost(config, config.num_layers + config.num_single_layers, 24.0 * width**2)


DOUBLE_MEMBERS = ("norm1", "norm1_context", "attn", "norm2", "ff", "norm2_context", "ff_context")
SINGLE_MEMBERS = ("norm", "attn", "proj_mlp", "act_mlp", "proj_out")
JOINT_MEMBERS = ("heads", "to_q", "to_k", "to_v", "norm_q", "norm_k")
ADA_MEMBERS = ("linear", "silu", "norm")

FAMILY = Family(
    model=FluxTransformer2DModel,
    layers=(
        Layer(FluxTransformerBlock, double_block, DOUBLE_MEMBERS),
        Layer(FluxSingleTransformerBlock, single_block, SINGLE_MEMBERS),
        Layer(FluxAttention, layers.attention, JOINT_MEMBERS),
        Layer(AdaLayerNormZero, layers.ada_zero, ADA_MEMBERS),
        Layer(AdaLayerNormZeroSingle, layers.ada_single, ADA_MEMBERS),
        Layer(AdaLayerNormContinuous, layers.ada_continuous, ADA_MEMBERS),
    ),
    members=(
        "x_embedder",
        "context_embedder",
        "time_text_embed",
        "pos_embed",
        "transformer_blocks",
        "single_transformer_blocks",
        "norm_out",
        "proj_out",
    ),
    sources=(FluxPosEmbed.forward, apply_rotary_emb),
    processors=(FluxAttnProcessor,),
    pack=pack,
    compute=compute,
    cost=cost,
    stream="visual",
    attends_to_padding=True,
)
