"""WanTransformer3DModel (Wan 2.1 and 2.2): self-attention over latent tokens, cross-attention to the text.

Text is ragged conditioning: its rows go to every rank that holds a token of the sequence. So do timesteps, of which a
sample has one, or one per latent frame or per token (Wan 2.2 TI2V).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers.models.normalization import FP32LayerNorm
from diffusers.models.transformers.transformer_wan import (
    WanAttention,
    WanAttnProcessor,
    WanRotaryPosEmbed,
    WanTimeTextImageEmbedding,
    WanTransformer3DModel,
    WanTransformerBlock,
)
from torch import Tensor, nn
from torch.nn import functional

from knapformer.adapters import layers
from knapformer.adapters.family import Family, Layer, layer_cost
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
)
from knapformer.errors import ConfigurationError, LengthsError
from knapformer.execution.devices import to_device
from knapformer.execution.local_attention import LocalAttention
from knapformer.execution.rows import RowIndex, add_gated, modulate
from knapformer.given.cost import CostModel

TEXT_TOKENS = 512
"""Length to which Wan's pipelines pad text, with zeros."""


def pack(
    model: Any,
    keep_padding: bool,
    hidden_states: Any,
    timestep: Any = None,
    encoder_hidden_states: Any = None,
    encoder_hidden_states_image: Any = None,
    *,
    encoder_attention_mask: Any = None,
) -> Batch:
    """Per sample: hidden_states (C, F, H, W), timestep a number or one per latent frame or token,
    encoder_hidden_states (L_text, text_dim), encoder_hidden_states_image (L_image, image_dim) if the model takes it."""
    dtype, device, config = float_dtype(model), device_of(model), model.config
    latents = samples("hidden_states", hidden_states, 4, "(C, F, H, W)")
    text = samples("encoder_hidden_states", encoder_hidden_states, 2, "(L_text, C)", len(latents))
    text = real_text(text, encoder_attention_mask, keep_padding)
    if keep_padding:
        text = [functional.pad(part, (0, 0, 0, max(TEXT_TOKENS - len(part), 0))) for part in text]
    grids = [[size // p for size, p in zip(x.shape[1:], config.patch_size, strict=True)] for x in latents]
    lengths = [math.prod(grid) for grid in grids]
    wide = torch.promote_types(dtype, torch.float32)
    times, time_rows = _timesteps(timestep, grids, wide, device)
    patches = [patchify(x, config.patch_size, f"hidden_states[{i}]").flatten(1) for i, x in enumerate(latents)]
    empty_ids = torch.empty(0, 4, dtype=torch.int64, device=device)
    ids = [torch.cat([grid_ids(grid, device), row[:, None]], 1) for grid, row in zip(grids, time_rows, strict=True)]
    tensors = {
        "visual": stack_rows(
            "hidden_states", patches, config.in_channels * math.prod(config.patch_size), dtype, device
        ),
        "ids": torch.cat([empty_ids, *ids]),
        "timestep": torch.cat([torch.empty(0, dtype=wide, device=device), *times]).unsqueeze(1),
        "context": stack_rows("encoder_hidden_states", text, config.text_dim, dtype, device),
    }
    conditioning = {"timestep": [len(t) for t in times], "context": [len(part) for part in text]}
    if config.image_dim is not None:
        images = samples("encoder_hidden_states_image", encoder_hidden_states_image, 2, "(L_image, C)", len(latents))
        tensors["image"] = stack_rows("encoder_hidden_states_image", images, config.image_dim, dtype, device)
        conditioning["image"] = [len(part) for part in images]
    return Batch(lengths, tensors, lambda out: _unpatchify(out, grids, config), conditioning)


def _timesteps(
    values: Any, grids: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Each sample's timesteps, and for each of its tokens which of them it has."""
    if isinstance(values, Tensor) and values.shape[:1] == (1,):
        values = values.expand(len(grids), *values.shape[1:])
    if len(values) != len(grids):
        raise LengthsError(f"timestep has {len(values)} samples, hidden_states {len(grids)}")
    times, time_rows = [], []
    for i, (value, grid) in enumerate(zip(values, grids, strict=True)):
        time = torch.as_tensor(value).reshape(-1).to(device, dtype)
        num_tokens = math.prod(grid)
        if len(time) not in (1, grid[0], num_tokens):
            raise LengthsError(
                f"timestep[{i}]: expected one, or one for each of {grid[0]} latent frames or {num_tokens} tokens, "
                f"got {len(time)}"
            )
        times.append(time)
        tokens = torch.arange(num_tokens, device=device)
        time_rows.append(torch.div(tokens * len(time), max(num_tokens, 1), rounding_mode="floor"))
    return times, time_rows


def _unpatchify(out: Tensor, grids: Sequence[Sequence[int]], config: Any) -> list[Tensor]:
    """(T_home, patch · C) to (C, F, H, W) per sample."""
    (f, h, w), parts = config.patch_size, out.split([math.prod(grid) for grid in grids])
    shaped = [
        part.reshape(*grid, f, h, w, out.shape[1] // (f * h * w)) for part, grid in zip(parts, grids, strict=True)
    ]
    return [x.permute(6, 0, 3, 1, 4, 2, 5).flatten(5, 6).flatten(3, 4).flatten(1, 2) for x in shaped]


def compute(model: Any, batch: Batch, step: Any) -> Tensor:
    """The model on packed tokens: (T, patch · out_channels)."""
    tensors, config = batch.tensors, model.config
    routed = step.route_batch(
        tokens=(tensors["visual"], tensors["ids"]), named={name: [tensors[name]] for name in batch.conditioning}
    )
    patches, ids = routed.tokens
    named = {name: rows for name, (rows,) in routed.named.items()}
    packed = Packed(step, rotate=rotation(model.rope, ids), has_streams=False)
    num_times = step.conditioning_lengths("timestep")
    for name in batch.conditioning:
        packed.contexts[name] = LocalAttention(step.local_lengths, step.conditioning_lengths(name))
    if any(count != 1 for count in num_times):
        first_time = to_device(np.cumsum([0, *num_times], dtype=np.int64)[:-1], ids.device)
        packed.visual = RowIndex(first_time.index_select(0, packed.index.rows) + ids[:, 3])

    x = model.patch_embedding(patches.unflatten(1, (config.in_channels, *config.patch_size))).flatten(1)
    timestep = named["timestep"].squeeze(1)
    temb, modulation, text, image = model.condition_embedder(timestep, named["context"], named.get("image"))
    modulation = modulation.unflatten(1, (6, -1))
    for block in model.blocks:
        x = run_block(model, block, x, text, image, modulation, packed)

    shift, scale = (model.scale_shift_table + temb.unsqueeze(1)).unbind(1)
    normed = modulate(model.norm_out(x.float()), shift, scale, packed.visual).type_as(x)
    out: Tensor = model.proj_out(normed)
    return out


def rotation(rope: Any, ids: Tensor) -> Any:
    """Rotate (T, H, D) by the model's tables at the tokens' (frame, row, column)."""
    sizes = [rope.t_dim, rope.h_dim, rope.w_dim]
    cos, sin = (
        torch.cat([part[:, first::2].index_select(0, ids[:, axis]) for axis, part in enumerate(parts)], dim=1)
        for first, parts in enumerate((rope.freqs_cos.split(sizes, dim=1), rope.freqs_sin.split(sizes, dim=1)))
    )

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (x.shape[-1] // 2, 2)).unbind(-1)
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)  # in here, see ``layers.rotation``
        return torch.stack([x1 * c - x2 * s, x1 * s + x2 * c], dim=-1).flatten(-2).type_as(x)

    return rotate


def block(self: Any, x: Tensor, text: Tensor, image: Tensor | None, modulation: Tensor, packed: Packed) -> Tensor:
    """WanTransformerBlock: tokens (T, C), text and image rows, modulation (rows, 6, C)."""
    index = packed.visual
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.scale_shift_table + modulation.float()).unbind(1)
    normed = modulate(self.norm1(x.float()), shift, scale, index).type_as(x)
    x = add_gated(x.float(), self.attn1(normed, None, None, packed), gate, index).type_as(x)
    normed = self.norm2(x.float()).type_as(x)
    x = x + self.attn2(normed, text, image, packed)
    normed = modulate(self.norm3(x.float()), mlp_shift, mlp_scale, index).type_as(x)
    return add_gated(x.float(), self.ffn(normed), mlp_gate, index).type_as(x)


def attention(self: Any, x: Tensor, text: Tensor | None, image: Tensor | None, packed: Packed) -> Tensor:
    """WanAttention: self-attention of (T, C), or cross-attention to text and image rows."""
    q = self.norm_q(self.to_q(x)).unflatten(-1, (self.heads, -1))
    if text is None:
        k, v = _keys(self, x, "")
        out = packed.attention(q, k, v)
    else:
        out = _cross(q, *_keys(self, text, ""), packed, "context")
        if image is not None and self.add_k_proj is not None:
            out = out + _cross(q, *_keys(self, image, "added"), packed, "image")
    for layer in self.to_out:
        out = layer(out)
    return out


def _keys(attn: Any, rows_in: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """(R, C) to keys, normed, and values (R, H, D)."""
    if kind:
        k, v = attn.norm_added_k(attn.add_k_proj(rows_in)), attn.add_v_proj(rows_in)
    else:
        k, v = attn.norm_k(attn.to_k(rows_in)), attn.to_v(rows_in)
    return k.unflatten(-1, (attn.heads, -1)), v.unflatten(-1, (attn.heads, -1))


def _cross(q: Tensor, k: Tensor, v: Tensor, packed: Packed, name: str) -> Tensor:
    """Each sequence's tokens on this rank to its own context rows: (T, H·D)."""
    return packed.contexts[name](q.to(v.dtype), k.to(v.dtype), v).flatten(1)


def cost(config: Any) -> CostModel:
    """Cost of a block; cross-attention to 512 text tokens counts as token-wise work."""
    width = config.num_attention_heads * config.attention_head_dim
    per_token = 12.0 * width**2 + 4.0 * width * config.ffn_dim + 4.0 * width * TEXT_TOKENS
    return layer_cost(config, config.num_layers, per_token)


def check(model: Any) -> None:
    if model.config.pos_embed_seq_len is not None:
        raise ConfigurationError("no adapter for Wan with first and last frame (pos_embed_seq_len)")


FAMILY = Family(
    model=WanTransformer3DModel,
    layers=(
        Layer(
            WanTransformerBlock,
            block,
            ("norm1", "attn1", "norm2", "attn2", "norm3", "ffn", "scale_shift_table"),
        ),
        Layer(WanAttention, attention, ("heads", "to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "add_k_proj")),
        Layer(nn.Conv3d, layers.patch_convolution, ("weight", "bias")),
    ),
    members=("rope", "patch_embedding", "condition_embedder", "blocks", "norm_out", "proj_out", "scale_shift_table"),
    sources=(
        WanRotaryPosEmbed.__init__,
        WanRotaryPosEmbed.forward,
        WanTimeTextImageEmbedding.forward,
        FP32LayerNorm.forward,
    ),
    processors=(WanAttnProcessor,),
    pack=pack,
    compute=compute,
    cost=cost,
    stream=None,
    attends_to_padding=True,
    check=check,
)
