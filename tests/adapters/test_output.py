"""The loss of what a balanced transformer returns, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from family_cases import CASES, as_batch, balancer_of, one_size, stacked
from torch.nn import functional as F

from knapformer.adapters import balance, prepare
from knapformer.errors import ConfigurationError, LengthsError

IDS = [0, 1, 5]


def output_of(name: str = "wan", ids: list[int] = IDS, **options: Any) -> Any:
    model = balance(CASES[name].build().float(), balancer_of(CASES[name].build()))
    return model(**stacked(CASES[name], ids, needs_grad=False)[1], **options)


def values(output: Any, **options: Any) -> list[float]:
    target = [torch.zeros_like(x) for x in output.sample]
    names = ("rank_mean", "token_mean", "sample_mean")
    return [float(output.loss(target, reduction=name, **options).detach()) for name in names]


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "qwen-image-edit", "hunyuan-video"])
def test_reductions_by_hand(name: str) -> None:
    output = output_of(name)
    squares = [x.detach().square() for x in output.sample]
    tokens, samples = torch.cat([x.flatten() for x in squares]).mean(), torch.stack([x.mean() for x in squares]).mean()
    assert values(output) == pytest.approx([float(tokens), float(tokens), float(samples)], rel=1e-5)
    assert abs(tokens - samples) > 1e-3 * samples
    huber = values(output, elementwise=lambda x, y: F.huber_loss(x, y, reduction="none"))
    assert huber[1] == pytest.approx(
        float(
            torch.cat(
                [F.huber_loss(x.detach(), 0 * x.detach(), reduction="none").flatten() for x in output.sample]
            ).mean()
        ),
        rel=1e-5,
    )
    twice = values(output, weights=torch.tensor([2.0, 2.0, 2.0])[:, None, None])
    assert twice == pytest.approx([2 * x for x in values(output)], rel=1e-5)
    first = values(output, weights=[1.0, 0.0, 0.0])
    assert first[2] == pytest.approx(float(squares[0].mean()) / 3, rel=1e-5)


def test_a_rank_without_samples() -> None:
    """Where ``torch.stack`` of no losses raises, and a mean over no rows is NaN."""
    for name in ("flux", "wan"):
        model = balance(CASES[name].build().float(), balancer_of(CASES[name].build()))
        output = model(**stacked(CASES[name], [], needs_grad=False)[1])
        assert torch.isnan(F.mse_loss(output.rows, output.rows.detach()))
        for reduction in ("rank_mean", "token_mean", "sample_mean"):
            model.zero_grad()
            loss = output.loss([], reduction=reduction, weights=[])
            assert float(loss.detach()) == 0 and loss.dtype == torch.float32
            loss.backward(retain_graph=True)
            assert all(float(p.grad.abs().max()) == 0 for p in model.parameters() if p.grad is not None)
        with one_size():
            batch = model(**as_batch(CASES[name], [], needs_grad=False))
        assert float(batch.loss(torch.zeros_like(batch.sample), reduction="token_mean").detach()) == 0


def test_a_batch_is_the_list_of_its_samples() -> None:
    model = balance(CASES["flux"].build().float(), balancer_of(CASES["flux"].build()))
    with one_size():
        output = model(**as_batch(CASES["flux"], IDS, needs_grad=False))
    wanted = float(F.mse_loss(output.sample, torch.ones_like(output.sample)).detach())
    for target in (torch.ones_like(output.sample), list(torch.ones_like(output.sample))):
        assert float(output.loss(target, reduction="sample_mean").detach()) == pytest.approx(wanted, rel=1e-6)


def test_half_precision_is_reduced_in_float32() -> None:
    model = balance(CASES["flux"].build().bfloat16(), balancer_of(CASES["flux"].build()))
    output = model(**stacked(CASES["flux"], IDS, needs_grad=False)[1])
    loss = output.loss([x.detach() - 1 for x in output.sample], reduction="token_mean")
    assert output.rows.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(1, rel=0.02)


def test_micro_batches() -> None:
    """Over both, each loss is its share of the mean; half of it is what a caller is told who divides by 2."""
    model = balance(CASES["wan"].build().float(), balancer_of(CASES["wan"].build()))
    batches = [stacked(CASES["wan"], ids, needs_grad=False)[1] for ids in ([0, 1], [5])]
    steps = [prepare(model, **batch) for batch in batches]
    outputs = [model(**batch, step=step) for batch, step in zip(batches, steps, strict=True)]
    for i, whole in enumerate(values(output_of("wan"))):
        shares = [values(output, steps=steps)[i] for output in outputs]
        assert i == 0 or sum(shares) == pytest.approx(whole, rel=1e-5)
        doubled = [values(output, steps=steps, backward_divides_by=2)[i] for output in outputs]
        assert doubled == pytest.approx([share * (1 if i == 0 else 2) for share in shares], rel=1e-6)


def test_wrong_targets() -> None:
    output = output_of()
    zeros = [torch.zeros_like(x) for x in output.sample]
    with pytest.raises(LengthsError, match="this rank has 3 samples, the target 2"):
        output.loss(zeros[:2], reduction="token_mean")
    with pytest.raises(LengthsError, match=r"target\[1\] has shape \(4, 1, 4, 4\), expected \(4, 3, 4, 6\) as sample"):
        output.loss([zeros[0], zeros[0], zeros[2]], reduction="token_mean")
    with pytest.raises(LengthsError, match="this rank has 3 samples, and 1 weights"):
        output.loss(zeros, reduction="token_mean", weights=[1.0])
    with pytest.raises(ConfigurationError, match=r"must keep the shape .*, got \(\); .*reduction=\"none\""):
        output.loss(zeros, reduction="token_mean", elementwise=F.mse_loss)
    with pytest.raises(ConfigurationError, match="one of rank_mean, token_mean, sample_mean, got 'mean'"):
        output.loss(zeros, reduction="mean")
