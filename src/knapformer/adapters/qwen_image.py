"""QwenImageTransformer2DModel: text and image tokens in double blocks; one or several images per sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import AdaLayerNormContinuous
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenEmbedLayer3DRope,
    QwenEmbedRope,
    QwenImageTransformer2DModel,
    QwenImageTransformerBlock,
    QwenTimestepProjEmbeddings,
    apply_rotary_emb_qwen,
)
from torch import Tensor

from knapformer.adapters import layers
from knapformer.adapters.family import Family, Layer, layer_cost
from knapformer.adapters.flux import ADA_MEMBERS, JOINT_MEMBERS
from knapformer.adapters.packing import (
    Batch,
    Packed,
    device_of,
    float_dtype,
    grid_ids,
    real_text,
    run_block,
    samples,
    stack_rows,
    stack_vectors,
)
from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.devices import to_device
from knapformer.execution.rows import RowIndex, add_gated, modulate
from knapformer.given.cost import CostModel


def pack(
    model: Any,
    keep_padding: bool,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    encoder_hidden_states_mask: Any = None,
    timestep: Any = None,
    img_shapes: Any = None,
    *,
    additional_t_cond: Any = None,
) -> Batch:
    """Per sample: hidden_states (L, in_channels), encoder_hidden_states (L_text, joint_attention_dim) and its mask
    (L_text,) or None, timestep, img_shapes a list of (frames, height, width) in tokens, additional_t_cond if the model
    takes it."""
    dtype, device, config = float_dtype(model), device_of(model), model.config
    visual = samples("hidden_states", hidden_states, 2, "(L, C)")
    text = samples("encoder_hidden_states", encoder_hidden_states, 2, "(L_text, C)", len(visual))
    text = real_text(text, encoder_hidden_states_mask, keep_padding)
    lengths = [len(part) for part in visual]
    ids, text_ids = _position_ids(img_shapes, lengths, [len(part) for part in text], config.use_layer3d_rope, device)
    wide = torch.promote_types(dtype, torch.float32)
    vectors = [stack_vectors("timestep", timestep, len(visual), 1, wide, device)]
    if config.use_additional_t_cond:
        vectors.append(stack_vectors("additional_t_cond", additional_t_cond, len(visual), 1, wide, device))
    return Batch(
        {"text": [len(part) for part in text], "visual": lengths},
        {
            "visual": stack_rows("hidden_states", visual, config.in_channels, dtype, device),
            "visual_ids": ids,
            "text": stack_rows("encoder_hidden_states", text, config.joint_attention_dim, dtype, device),
            "text_ids": text_ids,
            "vectors": torch.cat(vectors, dim=1),
        },
        lambda rows: list(rows.split(lengths)),
    )


def _position_ids(
    shapes: Any, lengths: Sequence[int], text_lengths: Sequence[int], is_layered: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of the model's frequency tables: (T_visual, 4) frame, row, column and whether it is a condition image, and
    (T_text, 1)."""
    if isinstance(shapes, Sequence) and len(shapes) == 1:
        shapes = list(shapes) * len(lengths)
    if not isinstance(shapes, Sequence) or len(shapes) != len(lengths):
        raise LengthsError(f"img_shapes must list the images of each of {len(lengths)} samples, got {shapes!r}")
    ids = [torch.empty(0, 4, dtype=torch.int64, device=device)]
    text_ids = [torch.empty(0, 1, dtype=torch.int64, device=device)]
    for i, (sample, length, num_text) in enumerate(zip(shapes, lengths, text_lengths, strict=True)):
        images = [sample] if isinstance(sample[0], int) else list(sample)
        if sum(math.prod(image) for image in images) != length:
            raise LengthsError(f"img_shapes[{i}] {images} are not the {length} tokens of hidden_states[{i}]")
        for number, (frames, height, width) in enumerate(images):
            is_last_layer = is_layered and number == len(images) - 1
            first = torch.tensor([-1 if is_last_layer else number, -(height - height // 2), -(width - width // 2)])
            grid = grid_ids((frames, height, width), device) + to_device(first, device)
            ids.append(torch.cat([grid, grid.new_full((len(grid), 1), int(number > 0))], dim=1))
        first_text = max([max(h // 2, w // 2) for _, h, w in images] + [len(images) - 1] * is_layered)
        text_ids.append(torch.arange(first_text, first_text + num_text, device=device)[:, None])
    return torch.cat(ids), torch.cat(text_ids)


def compute(model: Any, batch: Batch, step: Any) -> Tensor:
    """The model on packed tokens: (T_visual, patch · out_channels)."""
    tensors = batch.tensors
    routed = step.route_batch(
        streams={
            "visual": (tensors["visual"], tensors["visual_ids"]),
            "text": (tensors["text"], tensors["text_ids"]),
        },
        conditioning=[tensors["vectors"]],
    )
    (visual, ids), (text, text_ids) = routed.streams["visual"], routed.streams["text"]
    (vectors,) = routed.conditioning
    visual, text = model.img_in(visual), model.txt_in(model.txt_norm(text))

    packed = Packed(step)
    packed.rotate = rotation(packed.merge(*_frequencies(model.pos_embed, text_ids, ids)))
    timestep, own = vectors[:, 0].to(visual.dtype), packed.visual
    extra: tuple[Tensor, ...] = (vectors[:, 1].long(),) if model.config.use_additional_t_cond else ()
    if model.zero_cond_t:
        # Condition images are modulated as if they were free of noise: rows S … 2 S are for them.
        timestep = torch.cat([timestep, timestep * 0])
        extra = tuple(torch.cat([value, value]) for value in extra)
        packed.visual = RowIndex(packed.visual.rows + packed.num_sequences * ids[:, 3])
    temb = model.time_text_embed(timestep, visual, *extra)
    for block in model.transformer_blocks:
        text, visual = run_block(model, block, visual, text, temb, packed)
    out: Tensor = model.proj_out(model.norm_out(visual, temb[: packed.num_sequences], own))
    return out


def _frequencies(pos_embed: Any, text_ids: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Complex rotations (T_text, D / 2) and (T_visual, D / 2) from the model's tables."""
    positive, negative = pos_embed.pos_freqs.to(ids.device), pos_embed.neg_freqs.to(ids.device)
    # Row -n of the negative table, which is stored back to front, is position -n.
    table = torch.cat([positive, negative])
    sizes = [size // 2 for size in pos_embed.axes_dim]
    at = torch.where(ids[:, :3] < 0, ids[:, :3] + len(table), ids[:, :3])
    parts = [part.index_select(0, at[:, axis]) for axis, part in enumerate(table.split(sizes, dim=1))]
    return positive.index_select(0, text_ids[:, 0]), torch.cat(parts, dim=1)


def rotation(frequencies: Tensor) -> Any:
    """Rotate (T, H, D) by (T, D / 2) complex numbers."""

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (x.shape[-1] // 2, 2)).contiguous())
        return torch.view_as_real(pairs * frequencies.unsqueeze(1)).flatten(-2).type_as(x)

    return rotate


def block(self: Any, visual: Tensor, text: Tensor, temb: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """QwenImageTransformerBlock: (T_visual, C) and (T_text, C) to (text, visual)."""
    shift, scale, gate, *mlp = self.img_mod(temb).chunk(6, dim=-1)
    text_shift, text_scale, text_gate, *text_mlp = self.txt_mod(temb[: packed.num_sequences]).chunk(6, dim=-1)
    visual_in = modulate(self.img_norm1(visual), shift, scale, packed.visual)
    text_in = modulate(self.txt_norm1(text), text_shift, text_scale, packed.text)
    visual_out, text_out = self.attn(visual_in, text_in, packed)
    visual = add_gated(visual, visual_out, gate, packed.visual)
    text = add_gated(text, text_out, text_gate, packed.text)
    visual = layers.feed_forward(visual, tuple(mlp), self.img_norm2, self.img_mlp, packed.visual)
    text = layers.feed_forward(text, tuple(text_mlp), self.txt_norm2, self.txt_mlp, packed.text)
    return layers.clip_half(text), layers.clip_half(visual)


def cost(config: Any) -> CostModel:
    """Cost of a block from the model's configuration."""
    width = config.num_attention_heads * config.attention_head_dim
    return layer_cost(config, config.num_layers, 24.0 * width**2)


def check(model: Any) -> None:
    if not model.pos_embed.scale_rope:
        raise ConfigurationError("no adapter for Qwen-Image without scale_rope")


FAMILY = Family(
    model=QwenImageTransformer2DModel,
    layers=(
        Layer(
            QwenImageTransformerBlock,
            block,
            ("img_mod", "img_norm1", "attn", "img_norm2", "img_mlp", "txt_mod", "txt_norm1", "txt_norm2", "txt_mlp"),
        ),
        Layer(Attention, layers.attention, (*JOINT_MEMBERS, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        Layer(AdaLayerNormContinuous, layers.ada_continuous, ADA_MEMBERS),
    ),
    members=(
        "img_in",
        "txt_in",
        "txt_norm",
        "time_text_embed",
        "pos_embed",
        "transformer_blocks",
        "norm_out",
        "proj_out",
        "zero_cond_t",
    ),
    sources=(
        QwenImageTransformerBlock._modulate,
        QwenTimestepProjEmbeddings.forward,
        QwenEmbedRope.__init__,
        QwenEmbedRope.forward,
        QwenEmbedRope._compute_video_freqs,
        QwenEmbedLayer3DRope.forward,
        QwenEmbedLayer3DRope._compute_condition_freqs,
        apply_rotary_emb_qwen,
    ),
    processors=(QwenDoubleStreamAttnProcessor2_0,),
    pack=pack,
    compute=compute,
    cost=cost,
    stream="visual",
    attends_to_padding=False,
    check=check,
)
