"""Inputs at the edge, what a model is recomputed and costed as, and configurations that no adapter knows."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from family_cases import ALL, CASES, GRIDS, MAIN_CASES, TEXT_LENGTHS, TOLERANCE, balancer_of, keep_float64, stacked
from torch import Tensor

from knapformer.adapters import balance, cost_of, layers, prepare
from knapformer.adapters.family import Family, check_sources
from knapformer.adapters.flux import FAMILY as FLUX
from knapformer.adapters.hunyuan_video import FAMILY as HUNYUAN_VIDEO
from knapformer.adapters.qwen_image import FAMILY as QWEN_IMAGE
from knapformer.adapters.sd3 import FAMILY as SD3
from knapformer.adapters.wan import FAMILY as WAN
from knapformer.errors import ConfigurationError, RankError
from knapformer.given.cost import Machine
from knapformer.given.shapes import model_shape

NAMES = list(MAIN_CASES.values())


def balanced_case(name: str) -> tuple[Any, dict[str, Any]]:
    model = CASES[name].build()
    return balance(model, balancer_of(model)), stacked(CASES[name], ALL, needs_grad=False)[1]


def without_text(name: str, arguments: dict[str, Any], sample: int) -> dict[str, Any]:
    """A sample has lost its caption: no text row, or text that is all masked."""
    text = list(arguments["encoder_hidden_states"])
    changed: dict[str, Any] = {"encoder_hidden_states": text}
    if "encoder_attention_mask" in arguments:
        masks = list(arguments["encoder_attention_mask"])
        masks[sample] = torch.zeros_like(masks[sample])
        changed["encoder_attention_mask"] = masks
    else:
        text[sample] = text[sample][:0]
    if name == "flux":
        changed["txt_ids"] = [torch.zeros(len(part), 3, dtype=torch.int64) for part in text]
    return arguments | changed


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_without_text_changes_no_other_and_has_finite_gradients(name: str) -> None:
    model, arguments = balanced_case(name)
    changed = without_text(name, arguments, 1)
    with keep_float64():
        wanted = model(**arguments).sample
        output = model(**changed)
        sum(part.square().sum() for part in output.sample).backward()
    for i in ALL:
        distance = (output.sample[i] - wanted[i]).norm() / wanted[i].norm()
        assert distance > 1e-3 if i == 1 else distance < TOLERANCE, f"sample {i}"
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) > 20
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values())
    if name not in ("flux", "sd3"):  # a refiner, or cross-attention, of which diffusers makes 0 / 0
        return
    alone = CASES[name].build()
    with keep_float64(), torch.no_grad():
        batched = {key: value[1] if key in CASES[name].shared else value[1][None] for key, value in changed.items()}
        own = alone(**batched).sample[0]
    assert (output.sample[1] - own).norm() < TOLERANCE * own.norm()


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_computes_every_block_twice(name: str) -> None:
    model, arguments = balanced_case(name)
    kinds = ("blocks", "transformer_blocks", "single_transformer_blocks")
    blocks = [block for kind in kinds for block in getattr(model, kind, [])]
    assert len(blocks) >= 2
    runs: Counter[int] = Counter()
    for number, module in enumerate(blocks):
        module.register_forward_pre_hook(lambda *_, number=number: runs.update([number]))

    def train() -> list[int]:
        runs.clear()
        model(**arguments).rows.sum().backward()
        return [runs[number] for number in range(len(blocks))]

    assert train() == [1] * len(blocks)
    model.enable_gradient_checkpointing()
    assert train() == [2] * len(blocks)
    runs.clear()
    with torch.no_grad():
        model(**arguments)
    assert set(runs.values()) == {1}, "nothing to recompute without gradients"


HEADS_38 = {"num_attention_heads": 38, "attention_head_dim": 64, "num_layers": 38}
REAL = [
    (FLUX, {}, "flux.1-dev"),
    (HUNYUAN_VIDEO, {}, "hunyuanvideo"),
    (QWEN_IMAGE, {}, "qwen-image"),
    (SD3, HEADS_38 | {"dual_attention_layers": ()}, "sd3.5-large"),
    (WAN, {}, "wan2.1-14b"),
    (WAN, {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960}, "wan2.1-1.3b"),
]


def config_of(family: Family, **changes: Any) -> Any:
    """diffusers' default configuration, which is that of the published weights, with changes."""
    parameters = inspect.signature(family.model.__init__).parameters
    return SimpleNamespace(**{name: p.default for name, p in parameters.items()} | changes)


@pytest.mark.parametrize(("family", "changes", "name"), REAL, ids=[name for *_, name in REAL])
def test_the_cost_of_published_configurations_is_that_of_their_shape(family: Family, changes: Any, name: str) -> None:
    cost, shape = family.cost(config_of(family, **changes)), model_shape(name)
    assert (cost.hidden, cost.num_heads, cost.num_layers) == (shape.width, shape.num_heads, shape.num_layers)
    assert cost.linear_flops_per_token == shape.linear_flops_per_token
    assert cost.attention_flops_per_pair == shape.attention_flops_per_pair


def test_a_second_attention_costs_as_much_as_the_first() -> None:
    """SD 3.5 medium: 13 of 24 blocks have two. The second has q, k, v and output of its own: 8 · width² more."""
    config = config_of(SD3, num_attention_heads=24, num_layers=24, dual_attention_layers=tuple(range(13)))
    cost = SD3.cost(config)
    assert cost.linear_flops_per_token == pytest.approx((24 + 8 * 13 / 24) * cost.hidden**2)
    assert cost.attention_flops_per_pair == pytest.approx(4 * cost.hidden * (1 + 13 / 24))


def test_what_is_given_replaces_what_the_configuration_says() -> None:
    model, machine = CASES["flux"].build(), Machine(bytes_per_element=4)
    cost = cost_of(model, gamma=0.25, machine=machine)
    assert (cost.gamma, cost.machine, cost.hidden, cost.num_layers) == (0.25, machine, 48, 4)
    assert cost_of(model) != cost


@pytest.mark.parametrize("family", [FLUX, WAN, QWEN_IMAGE, SD3, HUNYUAN_VIDEO], ids=lambda f: f.model.__name__)
def test_changed_sources_of_every_kind_are_named(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sources(family, "0.42.1")

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args

    for cls, method in [
        (family.processors[0], "__call__"),
        (family.layers[0].cls, "forward"),
        (family.model, "forward"),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(cls, method, other)
            with pytest.raises(ConfigurationError, match=r"does not compute .* changed: "):
                check_sources(family, "0.42.1")


def test_configurations_that_no_adapter_knows() -> None:
    from family_cases import qwen, sd3, wan

    for model, change, text in (
        (wan(), {"pos_embed_seq_len": 514}, "no adapter for Wan with first and last frame"),
        (sd3(), {"pos_embed_max_size": None}, "no adapter for SD3 without pos_embed_max_size"),
    ):
        model._internal_dict = type(model.config)(dict(model.config) | change)
        with pytest.raises(ConfigurationError, match=text):
            balance(model, balancer_of(model))
    model = qwen()
    model.pos_embed.scale_rope = False
    with pytest.raises(ConfigurationError, match="no adapter for Qwen-Image without scale_rope"):
        balance(model, balancer_of(model))


def test_a_step_is_prepared_from_inputs_by_position_too() -> None:
    model, arguments = balanced_case("wan")
    by_position = [arguments[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    with torch.no_grad():
        step = prepare(model, *by_position)
        assert step.plan.lengths.tolist() == [f * h * w // 4 for f, h, w in GRIDS]
        assert step.conditioning_lengths("context") == [TEXT_LENGTHS[i] for i in step.sequence_ids.tolist()]
        found = model(*by_position, step=step).sample
        assert all(torch.equal(a, b) for a, b in zip(found, model(**arguments).sample, strict=True))


@pytest.mark.parametrize(
    ("name", "nothing"),
    [
        ("flux", ("joint_attention_kwargs", "controlnet_block_samples", "controlnet_single_block_samples")),
        ("wan", ("attention_kwargs", "encoder_hidden_states_image")),
        ("qwen-image", ("attention_kwargs", "controlnet_block_samples")),
        ("sd3", ("joint_attention_kwargs", "block_controlnet_hidden_states", "skip_layers")),
        ("hunyuan-video", ("attention_kwargs",)),
    ],
)
def test_arguments_of_diffusers_that_are_none_change_nothing(name: str, nothing: tuple[str, ...]) -> None:
    model, arguments = balanced_case(name)
    with torch.no_grad():
        wanted = model(**arguments).rows
        assert torch.equal(model(**arguments, **dict.fromkeys(nothing)).rows, wanted)


def replaced(values: list[Any], i: int, value: Any) -> list[Any]:
    return [*values[:i], value, *values[i + 1 :]]


def bad_inputs() -> list[Any]:
    found = []
    ids = [torch.zeros(h * w, 3, dtype=torch.bfloat16) for _, h, w in GRIDS]
    for value, text in ((255.0, ""), (256.0, "got 256"), (-256.0, "got 256")):
        last = ids[5].clone()
        last[-1, 2] = value
        found.append(
            ("flux", {"img_ids": replaced(ids, 5, last)}, text and f"must be integers, or .* below 256 .*{text}")
        )
    flux = stacked(CASES["flux"], ALL, needs_grad=False)[1]
    sd3 = stacked(CASES["sd3"], ALL, needs_grad=False)[1]
    text, images = flux["encoder_hidden_states"], flux["hidden_states"]
    longer = [torch.ones(len(part)) for part in text[:-1]] + [torch.ones(len(text[-1]) + 1)]
    found += [
        ("flux", {"encoder_hidden_states": [*text, text[0]]}, "encoder_hidden_states has 7 samples, hidden_states 6"),
        ("flux", {"encoder_attention_mask": longer}, r"encoder_attention_mask\[5\] has 7 entries, its text 6 rows"),
        (
            "flux",
            {"hidden_states": [part[:, :3] for part in images]},
            r"hidden_states\[0\]: the model takes 4 channels",
        ),
        (
            "flux",
            {"img_ids": replaced(flux["img_ids"], 2, torch.zeros(4, 2))},
            r"img_ids\[2\]: expected 3 ids per token",
        ),
        ("flux", {"hidden_states": replaced(images, 3, images[3][0])}, r"hidden_states\[3\]: expected a tensor"),
        ("flux", {"timestep": 0.5}, "timestep: expected one value per sample, got 0.5"),
        ("flux", {"pooled_projections": [torch.zeros(5)] * 6}, "expected 6 channels for each of 6"),
        ("sd3", {"hidden_states": replaced(sd3["hidden_states"], 0, torch.zeros(4, 4, 18))}, "2 × 9 tokens, .* 8 pos"),
        ("sd3", {"hidden_states": replaced(sd3["hidden_states"], 0, torch.zeros(4, 18, 4))}, "9 × 2 tokens, .* 8 pos"),
        ("sd3", {"hidden_states": replaced(sd3["hidden_states"], 0, torch.zeros(4, 16, 16))}, ""),
        ("wan", {"timestep": [torch.zeros(n) for n in (2, 3, 1, 1, 2, 1)]}, r"timestep\[0\]: expected one, or one for"),
    ]
    return found


@pytest.mark.parametrize(("name", "change", "text"), bad_inputs())
def test_inputs_just_beyond_what_a_model_takes(name: str, change: dict[str, Any], text: str) -> None:
    """Without a text, the inputs are just within."""
    model, arguments = balanced_case(name)
    with torch.no_grad():
        if not text:
            assert bool(model(**arguments | change).rows.isfinite().all())
            return
        with pytest.raises(RankError, match=text):
            model(**arguments | change)


def test_a_timestep_for_each_latent_frame_is_that_of_its_tokens() -> None:
    """diffusers' Wan takes one for each token."""
    model, arguments = balanced_case("wan")
    by_frame = [
        1000 * torch.rand(f, generator=torch.Generator().manual_seed(f), dtype=torch.float64) for f, *_ in GRIDS
    ]
    by_token = [t.repeat_interleave(h * w // 4) for t, (_, h, w) in zip(by_frame, GRIDS, strict=True)]
    assert {len(t) for t in by_frame} == {1, 2, 3}
    with keep_float64(), torch.no_grad():
        found, wanted = (model(**arguments | {"timestep": times}).sample for times in (by_frame, by_token))
        at_once = model(**arguments | {"timestep": [t[:1] for t in by_frame]}).sample
    for i, (frames, *_) in enumerate(GRIDS):
        assert (found[i] - wanted[i]).norm() < TOLERANCE * wanted[i].norm()
        assert frames == 1 or (at_once[i] - wanted[i]).norm() > 1e-3 * wanted[i].norm()


def test_float16_stays_finite() -> None:
    x = torch.tensor([1e4, 6e4, torch.inf, -torch.inf], dtype=torch.float16)
    assert layers.clip_half(x).tolist() == [1e4, x[1].item(), 65504.0, -65504.0]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert layers.clip_half(x.to(dtype)).tolist()[2:] == [torch.inf, -torch.inf]


@pytest.mark.parametrize("name", ["flux", "qwen-image", "sd3"])
def test_text_that_overflows_float16_is_clipped(name: str) -> None:
    """After the first double block, where diffusers clips it."""
    model = CASES[name].build().half()
    with torch.no_grad():
        block = model.transformer_blocks[0]
        mlp = block.txt_mlp if name == "qwen-image" else block.ff_context
        modulation = block.txt_mod[1] if name == "qwen-image" else block.norm1_context.linear
        mlp.net[2].bias.fill_(6e4)
        modulation.bias[-len(mlp.net[2].bias) :] = 100.0  # the gate of the MLP
    balance(model, balancer_of(model))
    outputs: list[Tensor] = []
    block.register_forward_hook(lambda _module, _arguments, found: outputs.append(found[0]))
    with torch.no_grad():
        model(**stacked(CASES[name], ALL, needs_grad=False)[1])
    assert outputs[0].dtype == torch.float16 and len(outputs[0]) == sum(TEXT_LENGTHS)
    assert float(outputs[0].max()) == 65504.0


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("flux", (16, 4), (0, 16, 4)),
        ("qwen-image", (16, 16), (0, 16, 16)),
        ("sd3", (4, 4, 6), (0, 4, 4, 6)),
        ("wan", (4, 3, 4, 6), (0, 4, 3, 4, 6)),
        ("hunyuan-video", (4, 1, 4, 6), (0, 4, 1, 4, 6)),
    ],
)
def test_a_batch_of_none_comes_back_as_one_with_a_graph(
    name: str, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    model, arguments = balanced_case(name)
    empty = {key: [] if key == "img_shapes" else torch.stack(list(values)[:1])[:0] for key, values in arguments.items()}
    output = model(**empty | {"hidden_states": torch.zeros(0, *shape)})
    assert output.sample.shape == expected
    output.sample.sum().backward()
    assert any(p.grad is not None for p in model.parameters())


def test_without_diffusers_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = CASES["flux"].build()
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        ConfigurationError, match=r"diffusers cannot be imported .*: pip install knapformer\[diffusers\]"
    ):
        cost_of(model)
