"""Flow-matching training steps of NVIDIA Automodel, with the calls that its adapters make, on balanced models.

The calls are restated, not copied. They were read from ``nemo_automodel/components/flow_matching/adapters``:

- ``qwen_image.py`` at commit 9892fa9c, ``qwen_image_edit.py`` at 57755ada, ``base.py`` at 4a953f19 and the step of
  ``pipeline.py`` at 2bc6bcbe, in NVIDIA-NeMo/Automodel;
- ``flux.py`` and ``simple.py`` (Wan) at commit 197f235e of the fork kashif/Automodel: NVIDIA's own were not at hand.

Automodel has no adapter for SD3, and its ``hunyuan.py`` is for HunyuanVideo 1.5, which is another class: these two are
called as diffusers' 0.42.1 pipelines call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("diffusers")

from family_cases import CASES, balancer_of, draw, keep_float64, parameter_gradients, summed
from launch import run_ranks

from knapformer.adapters import FAMILIES, balance

BUCKETS = [(3, 5, 3, 8, 12), (2, 3, 1, 16, 8)]
"""Of each rank: samples, rows of text, and frames, height and width of latents."""
FLOW_SHIFT = 3.0
Inputs = dict[str, Any]


def packed(latents: Tensor) -> Tensor:
    """(B, C, H, W) to (B, tokens, 4 C), in patches of 2 × 2."""
    return nn.functional.pixel_unshuffle(latents, 2).flatten(2).mT


def unpacked(tokens: Tensor, like: Tensor) -> Tensor:
    height, width = like.shape[-2] // 2, like.shape[-1] // 2
    return nn.functional.pixel_shuffle(tokens.mT.unflatten(2, (height, width)), 2)


def call_flux(model: Any, noisy: Tensor, times: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
    """Ids in the model's dtype: of the image for all samples, of the text for each."""
    height, width = noisy.shape[-2] // 2, noisy.shape[-1] // 2
    ids = torch.cartesian_prod(torch.zeros(1).long(), torch.arange(height), torch.arange(width)).to(noisy.dtype)
    (tokens, *_) = model(
        hidden_states=packed(noisy), encoder_hidden_states=text, pooled_projections=pooled, timestep=times / 1000.0,
        img_ids=ids, txt_ids=text.new_zeros(*text.shape[:2], 3), guidance=torch.full((len(noisy),), 3.5),
        return_dict=False,
    )  # fmt: skip
    return unpacked(tokens, noisy)


def call_wan(model: Any, noisy: Tensor, times: Tensor, text: Tensor, _pooled: Tensor) -> Tensor:
    """Of ``SimpleAdapter``."""
    scale = {"scale": 1.0}
    inputs = {"hidden_states": noisy, "timestep": times, "encoder_hidden_states": text, "attention_kwargs": scale}
    return model(**inputs, return_dict=False)[0]


def call_qwen(model: Any, noisy: Tensor, times: Tensor, text: Tensor, _pooled: Tensor) -> Tensor:
    shapes = [[(1, noisy.shape[-2] // 2, noisy.shape[-1] // 2)]] * len(noisy)
    tokens = model(
        hidden_states=packed(noisy), encoder_hidden_states=text, encoder_hidden_states_mask=None,
        timestep=times / 1000.0, img_shapes=shapes, guidance=None, return_dict=False,
    )[0]  # fmt: skip
    return unpacked(tokens, noisy)


def call_qwen_edit(model: Any, noisy: Tensor, times: Tensor, text: Tensor, _pooled: Tensor) -> Tensor:
    """With context images of another size, and padded text with a mask.

    Automodel also gives ``txt_seq_lens=None``, which this diffusers itself no longer takes.
    """
    context = draw(7, len(noisy), noisy.shape[1], 4, 6)
    sizes = [(1, x.shape[-2] // 2, x.shape[-1] // 2) for x in (noisy, context)]
    target = packed(noisy)
    tokens = model(
        hidden_states=torch.cat([target, packed(context)], dim=1), timestep=times / 1000.0, guidance=None,
        encoder_hidden_states_mask=mask_of(text), encoder_hidden_states=text,
        img_shapes=[list(sizes) for _ in range(len(noisy))], attention_kwargs=None, return_dict=False,
    )[0]  # fmt: skip
    return unpacked(tokens[:, : target.shape[1]], noisy)


def call_sd3(model: Any, noisy: Tensor, times: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
    return model(
        hidden_states=noisy, timestep=times, encoder_hidden_states=text, pooled_projections=pooled,
        joint_attention_kwargs=None, return_dict=False,
    )[0]  # fmt: skip


def call_hunyuan(model: Any, noisy: Tensor, times: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
    return model(
        hidden_states=noisy, timestep=times, encoder_hidden_states=text, encoder_attention_mask=mask_of(text),
        pooled_projections=pooled, guidance=noisy.new_full((len(noisy),), 6000.0), attention_kwargs=None,
        return_dict=False,
    )[0]  # fmt: skip


def mask_of(text: Tensor) -> Tensor:
    """The last row of every other sample's text is padding."""
    lengths = torch.tensor([text.shape[1] - i % 2 for i in range(len(text))])
    return torch.arange(text.shape[1]) < lengths[:, None]


CALLS: dict[str, tuple[Callable[..., Tensor], int, bool]] = {
    "flux": (call_flux, 1, False),
    "wan": (call_wan, 4, True),
    "qwen-image": (call_qwen, 4, False),
    "qwen-image-edit": (call_qwen_edit, 4, False),
    "sd3": (call_sd3, 4, False),
    "hunyuan-video": (call_hunyuan, 4, True),
}
"""The call, the channels of latents, and whether they have frames."""


def step(name: str, model: Any, rank: int) -> dict[str, Any]:
    """One step as Automodel's pipeline makes it, on a rank's bucket: the weighted loss is a mean over the rank."""
    call, channels, has_frames = CALLS[name]
    num_samples, num_text, frames, height, width = BUCKETS[rank]
    shape = (num_samples, channels, *([frames] if has_frames else []), height, width)
    latents, noise = draw(1, *shape), draw(2, *shape)
    text = draw(3, num_samples, num_text, 10).requires_grad_()
    pooled = draw(4, num_samples, 6).requires_grad_()
    sigma = torch.linspace(0.2, 0.9, num_samples, dtype=torch.float64)
    each = sigma.view(-1, *[1] * (latents.ndim - 1))
    noisy = ((1 - each) * latents + each * noise).requires_grad_()
    with keep_float64():
        prediction = call(model, noisy, 1000 * sigma, text, pooled)
        loss = ((prediction - (noise - latents)).square() * (1 + FLOW_SHIFT * each)).mean()
        loss.backward()
    gradients = {"noisy": noisy.grad, "text": text.grad, "pooled": pooled.grad}
    return {
        "prediction": {"": prediction.detach()},
        "loss": {"": loss.detach()},
        "inputs": {key: value for key, value in gradients.items() if value is not None},
        "parameters": parameter_gradients(model),
    }


def both(rank: int, _world_size: int) -> dict[str, Any]:
    """Of each family: of diffusers' own model, then of a balanced one. Parameter gradients are summed over ranks."""
    found: dict[str, Any] = {}
    for name in CALLS:
        plain, model = CASES[name].build(), CASES[name].build()
        results = [step(name, each, rank) for each in (plain, balance(model, balancer_of(model, 1)))]
        found[name] = [{**result, "parameters": summed(result["parameters"])} for result in results]
    return found


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Largest ‖Δ‖ / ‖reference‖ of each kind; a reference of 0 but for rounding is measured by its kind's largest."""
    result = {}
    for kind, values in wanted.items():
        assert set(found[kind]) >= set(values)
        norms = {key: float(x.norm()) for key, x in values.items()}
        scale = max(norms.values())
        over = {key: norm if norm > 1e-12 * scale else scale for key, norm in norms.items()}
        result[kind] = max(float((found[kind][key] - x).norm()) / over[key] for key, x in values.items())
    return result


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(both, len(BUCKETS), timeout_s=200, preload=["torch.distributed", *FAMILIES.values()])


@pytest.mark.parametrize("name", CALLS)
def test_a_step_of_automodel_is_the_same_balanced(ranks: list[dict[str, Any]], name: str) -> None:
    """Each rank has a bucket of its own. Negative control: the samples of the prediction turned round."""
    for own in ranks:
        wanted, found = own[name]
        errors = worst(found, wanted)
        assert max(errors.values()) < 1e-10, errors
        turned = {**found, "prediction": {"": found["prediction"][""].flip(0)}}
        assert worst(turned, wanted)["prediction"] > 1e-2
    assert len(ranks[0][name][0]["parameters"]) > 50
