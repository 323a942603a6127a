"""Small random transformers of each diffusers family in float64, samples of mixed sizes, and the comparison.

Some layers of diffusers work in float32 whatever the model's dtype. ``keep_float64`` leaves these casts out, for
diffusers' own forward and for the packed one alike; otherwise their rounding would be all that a comparison shows.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from plan_cases import random_plan
from torch import Tensor, nn

from knapformer import Balancer, Lengths, Plan
from knapformer.adapters import balance, cost_of

GRIDS = [(1, 4, 4), (3, 4, 6), (1, 2, 2), (1, 6, 4), (2, 2, 4), (1, 8, 6)]
"""Latent frames, height and width in latent pixels of each sample; images use height and width only."""
TEXT_LENGTHS = [5, 3, 1, 7, 4, 6]
ALL = list(range(len(GRIDS)))
HOMES = {1: [ALL], 2: [[0, 1, 2, 3], [4, 5]], 4: [[0, 1], [2], [3, 4], [5]]}
"""Which samples each rank loads."""
HOMES_WITH_EMPTY_RANK = {2: [ALL, []], 4: [[0, 1, 2], [], [3, 5], [4]]}
TOLERANCE = 1e-10


@contextlib.contextmanager
def keep_float64() -> Iterator[None]:
    """Casts of float64 tensors to float32 do nothing. A function mode would not reach what backward recomputes."""
    real_float, real_to = Tensor.float, Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        casts_down = torch.float32 in args or kwargs.get("dtype") == torch.float32
        return self if casts_down and self.dtype == torch.float64 else real_to(self, *args, **kwargs)

    def float_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else real_float(self, *args, **kwargs)

    with mock.patch.multiple(Tensor, float=float_, to=to):
        yield


@dataclass(frozen=True)
class Case:
    """A family's model, its samples, and which inputs need gradients.

    Attributes:
        build: a fresh model with the same weights every time, in float64.
        sample: the keyword arguments of one sample, without batch dimension.
        needs_grad: names of the inputs whose gradients are compared.
        listed: inputs that the packed model takes as a list; the others are stacked per sample.
        shared: inputs that diffusers takes without a batch dimension.
    """

    build: Callable[[], Any]
    sample: Callable[[int], dict[str, Any]]
    needs_grad: tuple[str, ...]
    shared: tuple[str, ...] = ()


def randomized(model: nn.Module, seed: int) -> Any:
    """The model in float64 with every parameter drawn anew, so that no gradient is zero by design."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.15 * noise + (1.0 if parameter.dim() == 1 and parameter.mean() == 1.0 else 0.0))
    return model


def draw(index: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * index + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def number(index: int) -> Tensor:
    """A time of a sample in (0, 1)."""
    return torch.tensor((index + 1) / (len(GRIDS) + 1), dtype=torch.float64)


def flux(*, guidance_embeds: bool = True, **config: Any) -> Any:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=10, pooled_projection_dim=6, guidance_embeds=guidance_embeds, axes_dims_rope=(4, 6, 6),
        **config,
    )  # fmt: skip
    return randomized(model, 1)


def image_ids(height: int, width: int) -> Tensor:
    grid = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([torch.zeros(height * width, dtype=torch.int64), *(axis.flatten() for axis in grid)], dim=1)


def flux_sample(i: int) -> dict[str, Any]:
    _, height, width = GRIDS[i]
    return {
        "hidden_states": draw(i, height * width, 4),
        "encoder_hidden_states": draw(i, TEXT_LENGTHS[i], 10),
        "pooled_projections": draw(i, 6),
        "timestep": number(i),
        "img_ids": image_ids(height, width),
        "txt_ids": torch.zeros(TEXT_LENGTHS[i], 3, dtype=torch.int64),
        "guidance": 1.0 + number(i),
    }


def wan(**config: Any) -> Any:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=3, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16,
        ffn_dim=40, num_layers=2, rope_max_seq_len=32, **config,
    )  # fmt: skip
    return randomized(model, 2)


def wan_sample(i: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(i, 4, *GRIDS[i]),
        "timestep": 1000 * number(i),
        "encoder_hidden_states": draw(i, TEXT_LENGTHS[i], 10),
    }


def wan_per_token(i: int) -> dict[str, Any]:
    """Wan 2.2 TI2V: the first frame of some samples is clean. Sample 0 has one timestep only."""
    sample = wan_sample(i)
    frames, height, width = GRIDS[i]
    times = sample["timestep"] * (torch.arange(frames) > 0 if frames > 1 else torch.ones(frames))
    return sample | {"timestep": times.double().repeat_interleave(height * width // 4)}


def wan_image(i: int) -> dict[str, Any]:
    """Wan 2.1 I2V; diffusers takes the last 512 rows for text."""
    sample = wan_sample(i)
    text = nn.functional.pad(sample["encoder_hidden_states"], (0, 0, 0, 512 - TEXT_LENGTHS[i]))
    return sample | {"encoder_hidden_states": text, "encoder_hidden_states_image": draw(i, 3, 7)}


def qwen(**config: Any) -> Any:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=10, axes_dims_rope=(4, 6, 6), **config,
    )  # fmt: skip
    return randomized(model, 3)


def qwen_sample(i: int) -> dict[str, Any]:
    _, height, width = GRIDS[i]
    return {
        "hidden_states": draw(i, height * width, 16),
        "encoder_hidden_states": draw(i, TEXT_LENGTHS[i], 10),
        "timestep": number(i),
        "img_shapes": [(1, height, width)],
    }


def qwen_edit(i: int) -> dict[str, Any]:
    """Some samples have condition images."""
    sample, (_, height, width) = qwen_sample(i), GRIDS[i]
    shapes = [(1, height, width), *[(1, 3, 2), (1, 1, 5)][: i % 3]]
    num_tokens = sum(h * w for _, h, w in shapes)
    return sample | {"hidden_states": draw(i, num_tokens, 16), "img_shapes": shapes}


def qwen_layered(i: int) -> dict[str, Any]:
    return qwen_edit(i) | {"additional_t_cond": torch.tensor(i % 2)}


def sd3(**config: Any) -> Any:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=10, caption_projection_dim=48, pooled_projection_dim=6, out_channels=4,
        pos_embed_max_size=8, **config,
    )  # fmt: skip
    return randomized(model, 4)


def sd3_sample(i: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(i, 4, *GRIDS[i][1:]),
        "encoder_hidden_states": draw(i, TEXT_LENGTHS[i], 10),
        "pooled_projections": draw(i, 6),
        "timestep": 1000 * number(i),
    }


def hunyuan(*, guidance_embeds: bool = True, **config: Any) -> Any:
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=3, attention_head_dim=16, num_layers=2, num_single_layers=2,
        num_refiner_layers=2, patch_size=2, patch_size_t=1, guidance_embeds=guidance_embeds, text_embed_dim=10,
        pooled_projection_dim=6, rope_axes_dim=(4, 6, 6), **config,
    )  # fmt: skip
    return randomized(model, 5)


def hunyuan_sample(i: int) -> dict[str, Any]:
    return {
        "hidden_states": draw(i, 4, *GRIDS[i]),
        "timestep": 1000 * number(i),
        "encoder_hidden_states": draw(i, TEXT_LENGTHS[i], 10),
        "encoder_attention_mask": torch.ones(TEXT_LENGTHS[i]),
        "pooled_projections": draw(i, 6),
        "guidance": 1000 * (1.0 + number(i)),
    }


def unguided(sample: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
    """Samples of a model that takes no guidance."""
    return lambda i: {name: value for name, value in sample(i).items() if name != "guidance"}


TOKENS = ("hidden_states", "encoder_hidden_states")
POOLED = (*TOKENS, "pooled_projections")

CASES = {
    "flux": Case(flux, flux_sample, POOLED, ("img_ids", "txt_ids")),
    "flux-schnell": Case(lambda: flux(guidance_embeds=False), unguided(flux_sample), POOLED, ("img_ids", "txt_ids")),
    "wan": Case(wan, wan_sample, TOKENS),
    "wan-per-token-timesteps": Case(wan, wan_per_token, TOKENS),
    "wan-image": Case(
        lambda: wan(image_dim=7, added_kv_proj_dim=36), wan_image, (*TOKENS, "encoder_hidden_states_image")
    ),
    "qwen-image": Case(qwen, qwen_sample, TOKENS),
    "qwen-image-edit": Case(lambda: qwen(zero_cond_t=True), qwen_edit, TOKENS),
    "qwen-image-layered": Case(lambda: qwen(use_layer3d_rope=True, use_additional_t_cond=True), qwen_layered, TOKENS),
    "sd3": Case(sd3, sd3_sample, POOLED),
    "sd3.5": Case(lambda: sd3(qk_norm="rms_norm", dual_attention_layers=(0, 1)), sd3_sample, POOLED),
    "hunyuan-video": Case(hunyuan, hunyuan_sample, POOLED),
    "hunyuan-video-unguided": Case(lambda: hunyuan(guidance_embeds=False), unguided(hunyuan_sample), POOLED),
    "hunyuan-video-token-replace": Case(lambda: hunyuan(image_condition_type="token_replace"), hunyuan_sample, POOLED),
}
MAIN_CASES = {"FLUX.1": "flux", "Wan": "wan", "Qwen-Image": "qwen-image", "SD3": "sd3", "HunyuanVideo": "hunyuan-video"}


def with_grad(case: Case, sample: dict[str, Any], wanted: bool = True) -> dict[str, Any]:
    return {
        name: value.clone().requires_grad_(wanted) if name in case.needs_grad else value
        for name, value in sample.items()
    }


@contextlib.contextmanager
def one_size(grid: tuple[int, int, int] = (3, 4, 6), num_text: int = 5) -> Iterator[None]:
    """All samples have one size, so that they make a batch."""
    names = {"GRIDS": [grid] * len(ALL), "TEXT_LENGTHS": [num_text] * len(ALL)}
    with mock.patch.dict(globals(), names):
        yield


def as_batch(case: Case, ids: Sequence[int], *, needs_grad: bool = True, **changed: Any) -> dict[str, Any]:
    """Samples of one size as diffusers' own forward takes them; sample 0 shapes an empty batch."""
    found = [case.sample(i) for i in ids] or [case.sample(0)]
    arguments: dict[str, Any] = {}
    for key, value in found[0].items():
        values = [sample[key] for sample in found]
        if key in case.shared:
            arguments[key] = value
        elif isinstance(value, list):
            arguments[key] = values[: len(ids)]
        else:
            arguments[key] = torch.stack(values)[: len(ids)]
    return with_grad(case, arguments | changed, needs_grad)


def run_batch(case: Case, model: Any, ids: Sequence[int], **options: Any) -> dict[str, Any]:
    """A batched call and its backward pass, of diffusers' own forward or of a balanced one: the same arguments."""
    arguments = as_batch(case, ids, **options)
    with keep_float64():
        (out,) = model(**arguments, return_dict=False)
        sum([(part * loss_weights(i, part)).sum() for i, part in zip(ids, out, strict=True)], out.sum() * 0).backward()
    inputs = {key: arguments[key].grad for key in case.needs_grad}
    return {
        "outputs": {"": out.detach()},
        "inputs": {"": {key: gradient for key, gradient in inputs.items() if gradient is not None}},
        "parameters": parameter_gradients(model),
    }


def reference(name: str, ids: Sequence[int] = ALL, model: Any = None) -> dict[str, Any]:
    """diffusers' own forward, sample by sample: outputs, input gradients and the sum of the parameter gradients."""
    case = CASES[name]
    model = case.build() if model is None else model
    outputs, inputs = {}, {}
    with keep_float64():
        for i in ids:
            sample = with_grad(case, case.sample(i))
            batched = {
                key: value if key in case.shared else [value] if isinstance(value, list) else value[None]
                for key, value in sample.items()
            }
            out = model(**batched).sample[0]
            (out * loss_weights(i, out)).sum().backward()
            outputs[i] = out.detach()
            inputs[i] = {key: sample[key].grad for key in case.needs_grad}
    return {"outputs": outputs, "inputs": inputs, "parameters": parameter_gradients(model)}


def loss_weights(i: int, out: Tensor) -> Tensor:
    return draw(i + 50, *out.shape)


def parameter_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def balancer_of(model: Any, seed: int = 0) -> Balancer:
    """Plans that put any tokens and tiles anywhere."""
    num_heads = model.config.num_attention_heads

    def plan(lengths: Lengths) -> Plan:
        return random_plan(lengths.to_lists(), num_heads, random.Random(seed), split=0.8)

    return Balancer(cost_of(model), planner=plan)


def stacked(case: Case, ids: Sequence[int], needs_grad: bool) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The samples, and the arguments of the packed model."""
    batch = [with_grad(case, case.sample(i), needs_grad) for i in ids]
    return batch, {key: [sample[key] for sample in batch] for key in case.sample(0)}


def balanced(name: str, ids: Sequence[int], *, needs_grad: bool = True, model: Any = None, **options: Any) -> Any:
    """The packed and balanced model on this rank's samples; parameter gradients are summed over ranks."""
    case = CASES[name]
    model = case.build() if model is None else model
    if "_knapformer" not in model.__dict__:
        balance(model, balancer_of(model, **options))
    batch, arguments = stacked(case, ids, needs_grad)
    with keep_float64():
        output = model(**arguments)
        loss = output.rows.sum() * 0
        for i, out in zip(ids, output.sample, strict=True):
            loss = loss + (out * loss_weights(i, out)).sum()
        loss.backward()
    return {
        "outputs": {i: out.detach() for i, out in zip(ids, output.sample, strict=True)},
        "inputs": {
            i: {key: sample[key].grad for key in case.needs_grad if sample[key].grad is not None}
            for i, sample in zip(ids, batch, strict=True)
        },
        "parameters": summed(parameter_gradients(model)),
    }


def summed(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    if dist.is_initialized():
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return gradients


def merged(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' results as one; parameter gradients are the same on every rank."""
    merged_results = copy.copy(results[0])
    for key in ("outputs", "inputs"):
        merged_results[key] = {i: value for result in results for i, value in result[key].items()}
    return merged_results


def errors(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Largest ‖Δ‖ / ‖reference‖ over the tensors of outputs, input gradients and parameter gradients.

    A reference that is 0 but for rounding (a bias that softmax cancels) is measured by the largest of its kind.
    """
    outputs = _largest(found["outputs"], wanted["outputs"])
    inputs = [_largest(found["inputs"][i], wanted["inputs"][i]) for i in found["inputs"] if found["inputs"][i]]
    assert set(found["parameters"]) >= set(wanted["parameters"])
    return {
        "output": outputs,
        "input gradients": max(inputs, default=0.0),
        "parameter gradients": _largest(found["parameters"], wanted["parameters"]),
    }


def _largest(found: dict[Any, Tensor], wanted: dict[Any, Tensor]) -> float:
    scale = max((float(x.norm()) for x in wanted.values()), default=0.0)
    return max((_relative(found[key], x, scale) for key, x in wanted.items()), default=0.0)


def _relative(found: Tensor, wanted: Tensor, scale: float) -> float:
    difference, norm = float((found - wanted).norm()), float(wanted.norm())
    return difference / (norm if norm > 1e-12 * scale else scale)
