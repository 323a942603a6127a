"""The memory model against measured peaks of real steps on the CPU."""

from dataclasses import replace

import pytest
import torch

from knapformer.errors import CapacityError, ConfigurationError
from knapformer.given.shapes import MODEL_SHAPES, model_shape
from knapformer.measure.memory_probe import peak_bytes
from knapformer.models import MMDiT, StreamIndex, local_attention
from knapformer.models.presets import make_config
from knapformer.parallel import checkpoint
from knapformer.predict.memory import MemoryModel

CASES = [
    # heads, head width, double blocks, single blocks, MLP ratio, sequences of 192 tokens, recompute, dtype
    (4, 32, 2, 2, 4, 8, "none", torch.float32),
    (4, 32, 2, 2, 4, 8, "block", torch.float32),
    (2, 48, 1, 3, 4, 10, "block", torch.float32),
    (6, 32, 3, 0, 2, 6, "none", torch.float32),
    (4, 16, 0, 4, 6, 12, "block", torch.float64),
    (4, 64, 1, 1, 4, 2, "none", torch.float32),
    (8, 32, 2, 2, 4, 1, "block", torch.float32),
    (2, 32, 6, 2, 3, 16, "none", torch.float32),
]
TEXT, VISUAL = 32, 160


def measured_and_predicted(case: tuple) -> tuple[float, float]:
    heads, head_width, doubles, singles, ratio, num_sequences, recompute, dtype = case
    config = make_config(
        num_heads=heads, head_width=head_width, num_double_blocks=doubles, num_single_blocks=singles, text_channels=48
    )
    config = replace(config, mlp_width=ratio * config.width, in_channels=48, out_channels=48)
    model = MMDiT(config).to(dtype)
    if recompute == "block":
        checkpoint(model, what="block")
    lengths = [TEXT + VISUAL] * num_sequences

    def rows(count: int, channels: int) -> torch.Tensor:
        return torch.full((count, channels), 0.5, dtype=dtype)

    def run() -> None:
        out = model(
            rows(VISUAL * num_sequences, 48),
            rows(TEXT * num_sequences, 48),
            torch.zeros(sum(lengths), 3, dtype=torch.int64),
            rows(num_sequences, config.conditioning_channels),
            torch.repeat_interleave(torch.arange(num_sequences), TEXT + VISUAL),
            StreamIndex.from_lengths([TEXT] * num_sequences, [VISUAL] * num_sequences),
            attention=local_attention(lengths),
        )
        out.square().mean().backward()

    size = torch.finfo(dtype).bits // 8
    num_parameters = sum(p.numel() for p in model.parameters())
    # Parameters are there before; gradients are made. The model counts float32 gradients.
    memory = MemoryModel(
        parameters=num_parameters * size / 4,
        blocks=["double"] * doubles + ["single"] * singles,
        width=config.width,
        mlp_width=config.mlp_width,
        io_channels=48,
        recompute=recompute,
        bytes_per_element=size,
        shard_size=1,
        state_bytes_per_parameter=4,
    )
    return peak_bytes(run, torch.device("cpu")), memory.peak_bytes(sum(lengths))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_within_a_tenth_of_the_measured_peak(case: tuple) -> None:
    measured, predicted = measured_and_predicted(case)
    assert predicted == pytest.approx(measured, rel=0.1)


def test_a_model_without_half_its_activations_would_be_noticed() -> None:
    measured, predicted = measured_and_predicted(CASES[0])
    assert predicted / 2 != pytest.approx(measured, rel=0.1)


def test_the_probe_counts_live_tensors_only() -> None:
    def run() -> None:
        for _ in range(5):
            torch.ones(1000).add(1.0)

    assert peak_bytes(run, torch.device("cpu")) == 8000


def test_every_model_has_parameters() -> None:
    assert all(shape.parameters >= 0.5e9 for shape in MODEL_SHAPES.values())


def test_more_shards_recompute_and_fewer_tokens_take_less() -> None:
    def memory(**changes: object) -> MemoryModel:
        arguments = {"shard_size": 8, "recompute": "block", **changes}
        return MemoryModel.of_model("flux.1-dev", model_shape("flux.1-dev"), **arguments)  # type: ignore[arg-type]

    peak = memory().peak_bytes(8000)
    assert memory(shard_size=32).peak_bytes(8000) < peak < memory(recompute="none").peak_bytes(8000)
    assert memory().peak_bytes(4000) < peak < memory().peak_bytes(8000, exchanged_elements=1e9)


def test_tokens_that_fit_fit_and_one_more_does_not() -> None:
    memory = MemoryModel.of_model("flux.1-dev", model_shape("flux.1-dev"), shard_size=8)
    tokens = memory.tokens_that_fit(80e9)
    assert 10_000 < tokens < 200_000
    assert memory.peak_bytes(tokens) <= 80e9 < memory.peak_bytes(tokens + 1)


def test_what_cannot_fit_says_by_how_much() -> None:
    memory = MemoryModel.of_model("flux.1-dev", model_shape("flux.1-dev"), shard_size=1)
    with pytest.raises(CapacityError, match=r"190\.4 GB of a rank that has 80\.0 GB, 110\.4 GB too many"):
        memory.tokens_that_fit(80e9)


def test_unknown_models_and_blocks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="the number of parameters of 'nope' is not known"):
        MemoryModel.of_model("nope", replace(model_shape("flux.1-dev"), parameters=0.0), shard_size=1)
    with pytest.raises(ConfigurationError, match=r"double or single .* got \['triple'\]"):
        MemoryModel(parameters=1, blocks=["triple"], width=8, mlp_width=8)
