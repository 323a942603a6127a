"""One long sequence in reduced precision: the packed and balanced model, and diffusers' own, against float32."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import diffusers
import torch
from family_cases import MAIN_CASES, image_ids, parameter_gradients, randomized, summed
from plan_cases import random_plan
from torch import Tensor

from knapformer import Balancer, Lengths, Plan
from knapformer.adapters import balance, cost_of

NUM_TEXT = 8
PRECISIONS = ("bfloat16", "float16", "autocast")
"""The model's dtype; ``autocast`` is bfloat16 over float32 weights."""

ALLOWED = 1.5
"""How many times the original's own error ours may be."""

FLOORS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "autocast": 2.0**-8}
"""Errors below one rounding of the result are not compared."""


class Row(NamedTuple):
    """One comparison; errors are ‖Δ‖ / ‖float32‖, root mean squares over the draws of the inputs.

    Attributes:
        plan: seed of the random plan, or None for the default planner's.
        ours, original: largest error of the output and of any parameter's gradient.
        worst: largest error of ours over the same tensor's of the original, or over the floor.
        where: of which tensor.
        spread: largest distance of all gradients from those of another plan, over the original's distance from float32.
    """

    family: str
    precision: str
    num_tokens: int
    plan: int | None
    ours: float
    original: float
    worst: float
    where: str
    spread: float


def build(name: str) -> Any:
    """A small random model in float32."""
    joint = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8}
    makers: dict[str, Callable[[], Any]] = {
        "flux": lambda: diffusers.FluxTransformer2DModel(
            in_channels=4, num_single_layers=1, pooled_projection_dim=6, guidance_embeds=True,
            axes_dims_rope=(4, 6, 6), **joint,
        ),
        "wan": lambda: diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=8, freq_dim=16,
            ffn_dim=40, num_layers=2, rope_max_seq_len=64,
        ),
        "qwen-image": lambda: diffusers.QwenImageTransformer2DModel(
            patch_size=2, in_channels=16, out_channels=4, axes_dims_rope=(4, 6, 6), **joint | {"num_layers": 2},
        ),
        "sd3": lambda: diffusers.SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, caption_projection_dim=32, pooled_projection_dim=6,
            out_channels=4, pos_embed_max_size=128, **joint | {"num_layers": 2},
        ),
        "hunyuan-video": lambda: diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=True,
            text_embed_dim=8, pooled_projection_dim=6, rope_axes_dim=(4, 6, 6),
        ),
    }  # fmt: skip
    return randomized(makers[name](), 1).float()


def sample(name: str, num_tokens: int, seed: int) -> dict[str, Any]:
    """One sequence of ``num_tokens`` visual tokens, a square of a power of 4, and a little text."""
    side = round(num_tokens**0.5)
    assert side * side == num_tokens, num_tokens
    generator = torch.Generator().manual_seed(num_tokens + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    time, text = torch.tensor(0.5), draw(NUM_TEXT, 8)
    if name == "flux":
        return {
            "hidden_states": draw(num_tokens, 4), "encoder_hidden_states": text, "pooled_projections": draw(6),
            "timestep": time, "img_ids": image_ids(side, side), "txt_ids": torch.zeros(NUM_TEXT, 3, dtype=torch.int64),
            "guidance": time,
        }  # fmt: skip
    if name == "wan":
        return {"hidden_states": draw(4, 4, side, side), "timestep": 1000 * time, "encoder_hidden_states": text}
    if name == "qwen-image":
        tokens = draw(num_tokens, 16)
        return {
            "hidden_states": tokens, "encoder_hidden_states": text, "timestep": time, "img_shapes": [(1, side, side)],
        }  # fmt: skip
    if name == "sd3":
        latent = draw(4, 2 * side, 2 * side)
        return {
            "hidden_states": latent, "encoder_hidden_states": text, "pooled_projections": draw(6),
            "timestep": 1000 * time,
        }  # fmt: skip
    return {
        "hidden_states": draw(4, 4, side, side), "timestep": 1000 * time, "encoder_hidden_states": text,
        "encoder_attention_mask": torch.ones(NUM_TEXT), "pooled_projections": draw(6), "guidance": 1000 * time,
    }  # fmt: skip


@contextlib.contextmanager
def in_precision(precision: str, device: str) -> Iterator[torch.dtype]:
    """The dtype of weights and inputs."""
    if precision == "autocast":
        with torch.autocast(device, torch.bfloat16):
            yield torch.float32
    else:
        yield getattr(torch, precision)


def run(
    name: str, precision: str, given: dict[str, Any], balancer: Any = None, *, is_home: bool = True, device: str = "cpu"
) -> dict[str, Tensor]:
    """The output, where it is at home, and every parameter's gradient, summed over ranks; in float32.

    Args:
        given: one sample.
        balancer: made for a model; without it, diffusers' own forward runs.
        is_home: whether this rank loads the sample. With a balancer, every rank calls this.
    """
    with in_precision(precision, device) as dtype:
        model = build(name).to(device, dtype)
        given = {key: on_device(value, device, dtype) for key, value in given.items()}
        if balancer is None:
            out = model(**{key: batched(key, value) for key, value in given.items()}).sample[0]
        else:
            balance(model, balancer(model))
            output = model(**{key: [value] * is_home for key, value in given.items()})
            out = output.sample[0] if is_home else output.rows
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device)
    (out.float() * weights).sum().mul(8 / max(out.numel(), 1) ** 0.5).backward()  # a size that suits float16
    gradients = {key: gradient.float() for key, gradient in parameter_gradients(model).items()}
    return (gradients if balancer is None else summed(gradients)) | (
        {"output": out.detach().float()} if is_home else {}
    )


def on_device(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Tensors of floating point in a dtype; times stay as they are."""
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() and value.ndim else value.dtype)


def batched(key: str, value: Any) -> Any:
    if key in ("img_ids", "txt_ids"):
        return value
    return [value] if isinstance(value, list) else value[None]


def balancer_with(seed: int | None) -> Callable[[Any], Balancer]:
    """A plan of its own for each seed; None for the default planner."""

    def plan_of(lengths: Lengths, num_heads: int) -> Plan:
        assert seed is not None
        return random_plan(lengths.to_lists(), num_heads, random.Random(seed), split=1.0)

    def make(model: Any) -> Balancer:
        num_heads = model.config.num_attention_heads
        if seed is None:
            return Balancer(cost_of(model))
        return Balancer(cost_of(model), planner=lambda lengths: plan_of(lengths, num_heads))

    return make


def compare(
    families: Sequence[str] = tuple(MAIN_CASES.values()),
    precisions: Sequence[str] = PRECISIONS,
    tokens: Sequence[int] = (256, 1024, 4096, 16384),
    plans: Sequence[int | None] = (None,),
    *,
    num_draws: int = 4,
    is_home: bool = True,
    device: str = "cpu",
) -> list[Row]:
    """Every combination, for one sequence at home on one rank. Every rank of the default group calls it.

    Args:
        plans: seeds of random plans, and None for the default planner's.
        num_draws: of the inputs. Errors of a small tensor vary from draw to draw.
        is_home: whether this rank loads the sequence; rows of the others leave out the output.
    """
    found = []
    for name, num_tokens, precision in product(families, tokens, precisions):
        errors: dict[int | None, list[Errors]] = {plan: [] for plan in plans}
        spreads = dict.fromkeys(plans, 0.0)
        for seed in range(num_draws):
            given = sample(name, num_tokens, seed)
            wide, own = (run(name, kind, given, device=device) for kind in ("float32", precision))
            ours = {
                plan: run(name, precision, given, balancer_with(plan), is_home=is_home, device=device) for plan in plans
            }
            for plan, result in ours.items():
                errors[plan].append(errors_of(result, own, wide))
                apart = [distance(result, other) for other in ours.values()]
                spreads[plan] = max(spreads[plan], *(x / distance(own, wide) for x in apart))
        for plan in plans:
            found.append(Row(name, precision, num_tokens, plan, *judged(errors[plan], precision), spreads[plan]))
    return found


Errors = dict[str, tuple[float, float]]
"""By tensor: ours, and the original's own."""


def errors_of(ours: dict[str, Tensor], own: dict[str, Tensor], wide: dict[str, Tensor]) -> Errors:
    """A gradient that is 0 but for rounding is measured by the largest of its kind."""
    scale = max(float(x.norm()) for key, x in wide.items() if key != "output")

    def error(x: Tensor, wanted: Tensor) -> float:
        norm = float(wanted.norm())
        return float((x.reshape(wanted.shape) - wanted).norm()) / (norm if norm > 1e-3 * scale else scale)

    return {key: (error(ours[key], wide[key]), error(own[key], wide[key])) for key in wide if key in ours}


def judged(draws: Sequence[Errors], precision: str) -> tuple[float, float, float, str]:
    """See ``Row``: ours, original, worst, where."""

    def mean(key: str, i: int) -> float:
        return (sum(errors[key][i] ** 2 for errors in draws) / len(draws)) ** 0.5

    pairs = {key: (mean(key, 0), mean(key, 1)) for key in draws[0]}
    ratios = {key: ours / max(own, FLOORS[precision]) for key, (ours, own) in pairs.items()}
    where = max(ratios, key=lambda key: ratios[key])
    return max(a for a, _ in pairs.values()), max(b for _, b in pairs.values()), ratios[where], where


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of all gradients together, each over its own size."""
    pairs = [(a[key], b[key]) for key in b if key != "output" and float(b[key].norm()) > 0]
    return sum(float((x - y).norm() / y.norm()) ** 2 for x, y in pairs) ** 0.5
