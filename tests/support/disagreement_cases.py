"""What ranks can do differently by a mistake with a ``Balancer``, and what each of them is then told (law 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knapformer import Balancer, CostModel
from knapformer.models import MMDiT, MMDiTConfig, local_attention
from knapformer.training.parallel import checkpoint

HEADS, WIDTH = 6, 8
COST = CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)
LENGTHS = ([9, 6], [12], [])
"""Rank 2 has no rows; it is no exception."""


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        what: in words.
        run: (rank, whether this rank is the one that differs); what it returns on a good run is ``expected``.
        odd: the rank that differs.
        error: of all ranks; empty where the mistake is mended instead, and the numbers are right.
        text: regular expression of its text.
    """

    what: str
    run: Callable[[int, bool], Any]
    odd: int
    error: str
    text: str = ""


def whole(planner: Any = "ulysses") -> Balancer:
    return Balancer(COST, planner=planner)


def rows(rank: int, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    count = sum(LENGTHS[rank])
    return (torch.arange(count * width).view(count, width) % 7 + rank).to(dtype)


def heads(rank: int, num_heads: int = HEADS, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(LENGTHS[rank]), num_heads, width, generator=generator)


def route_dtype(rank: int, odd: bool) -> None:
    whole().prepare(LENGTHS[rank]).route(rows(rank, dtype=torch.float32 if odd else torch.bfloat16))


def route_half(rank: int, odd: bool) -> None:
    whole().prepare(LENGTHS[rank]).route(rows(rank, dtype=torch.float16 if odd else torch.bfloat16))


def route_integers(rank: int, odd: bool) -> None:
    whole().prepare(LENGTHS[rank]).route(rows(rank, dtype=torch.int32 if odd else torch.int64))


def route_channels(rank: int, odd: bool) -> None:
    whole().prepare(LENGTHS[rank]).route(rows(rank, 4 if odd else 8))


def route_rows(rank: int, odd: bool) -> None:
    x = rows(rank)
    whole().prepare(LENGTHS[rank]).route(torch.cat([x, x[:1]]) if odd else x)


def batch_rows(rank: int, odd: bool) -> None:
    """Everything at once, and one tensor of the batch is wrong on one rank."""
    x = rows(rank)
    step = whole().prepare(LENGTHS[rank])
    step.route_batch(tokens=[x, torch.cat([x, x[:1]]) if odd else x], conditioning=[x[: len(LENGTHS[rank])]])


def batch_order(rank: int, odd: bool) -> None:
    """Streams in another order."""
    step = whole().prepare({"text": [2] * len(LENGTHS[rank]), "visual": [2] * len(LENGTHS[rank])})
    x = torch.zeros(2 * len(LENGTHS[rank]), 4)
    step.route_batch(streams={name: [x] for name in (("visual", "text") if odd else ("text", "visual"))})


def route_order(rank: int, odd: bool) -> None:
    step = whole().prepare({"text": [2] * len(LENGTHS[rank]), "visual": [2] * len(LENGTHS[rank])})
    x = torch.zeros(2 * len(LENGTHS[rank]), 4)
    for stream in ("visual", "text") if odd else ("text", "visual"):
        step.route(x, stream=stream)


def attend(rank: int, odd: bool, **other: Any) -> Tensor:
    """One layer, with what the odd one does otherwise: functions of q, k, v, or arguments of attention."""
    change = other.pop("change", None)
    step = whole().prepare(LENGTHS[rank])
    q, k, v = (step.route(heads(rank)) for _ in range(3))
    if odd and change is not None:
        q, k, v = change(q, k, v)
    return step.attention(q, k, v, **(other if odd else {}))


def widths(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda q, k, v: (q, torch.cat([k, k], dim=2), v))


def value_heads(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda q, k, v: (q, k, torch.cat([v, v], dim=1)))


def key_rows(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda q, k, v: (q, torch.cat([k, k[:1]]), torch.cat([v, v[:1]])))


def scale(rank: int, odd: bool) -> None:
    attend(rank, odd, scale=0.5)


def causal(rank: int, odd: bool) -> None:
    attend(rank, odd, causal=True)


def number_of_heads(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda *qkv: tuple(x[:, :4] for x in qkv))


def attention_dtype(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda *qkv: tuple(x.bfloat16() for x in qkv))


def attention_gradients(rank: int, odd: bool) -> None:
    attend(rank, odd, change=lambda *qkv: tuple(x.clone().requires_grad_() for x in qkv))


def one_layer_more(rank: int, odd: bool) -> None:
    step = whole().prepare(LENGTHS[rank])
    x = step.route(heads(rank))
    for _ in range(2 if odd else 1):
        x = step.attention(x, x, x)
    step.restore(x)


def prepares(rank: int, odd: bool) -> None:
    balancer = whole()
    if odd:
        balancer.prepare_micro_batches([LENGTHS[rank]])
    else:
        balancer.prepare(LENGTHS[rank])


def backward_order(rank: int, odd: bool) -> None:
    balancer, losses = whole(), []
    for _ in range(2):
        step = balancer.prepare(LENGTHS[rank])
        x = step.route(heads(rank).requires_grad_())
        losses.append(step.restore(step.attention(x, x, x)).sum())
    for loss in reversed(losses) if odd else losses:
        loss.backward()


def backward_order_of_models(rank: int, odd: bool) -> None:
    """The same with a model whose blocks are recomputed."""
    config = MMDiTConfig(
        in_channels=4,
        text_channels=5,
        conditioning_channels=6,
        num_heads=HEADS,
        head_width=WIDTH,
        rope_axes=(4, 2, 2),
        num_double_blocks=1,
        num_single_blocks=1,
    )
    torch.manual_seed(0)
    model, balancer, losses = checkpoint(MMDiT(config)), whole(), []
    lengths = {"text": [3] * len(LENGTHS[rank]), "visual": LENGTHS[rank]}
    for _ in range(2):
        step = balancer.prepare(lengths)
        visual = step.route(torch.randn(sum(LENGTHS[rank]), 4), stream="visual")
        text = step.route(torch.randn(3 * len(LENGTHS[rank]), 5), stream="text")
        ids = step.route(torch.zeros(3 * len(LENGTHS[rank]) + sum(LENGTHS[rank]), 3, dtype=torch.int64))
        c = step.route_conditioning(torch.randn(len(LENGTHS[rank]), 6))
        y = model(visual, text, ids, c, step.sequence_index, step.streams, attention=step.attention)
        losses.append(y.sum())
    for loss in reversed(losses) if odd else losses:
        loss.backward()


def one_pass(balancer: Balancer, rank: int, *, skip: bool = False) -> None:
    step = balancer.prepare(LENGTHS[rank])
    x = step.route(heads(rank).requires_grad_(torch.is_grad_enabled()))
    loss = step.restore(step.attention(x, x, x)).sum()
    if torch.is_grad_enabled() and not skip:
        loss.backward()


def validation_passes(rank: int, odd: bool) -> None:
    balancer = whole()
    with torch.no_grad():
        for _ in range(2 if odd else 3):
            one_pass(balancer, rank)
    one_pass(balancer, rank)


def skipped_backward(rank: int, odd: bool) -> None:
    balancer = whole()
    one_pass(balancer, rank, skip=odd)
    one_pass(balancer, rank)


def skipped_backward_at_home(rank: int, odd: bool) -> None:
    """Under a plan that moves nothing no rank waits for another before the next ``prepare``."""
    balancer = whole("home")
    one_pass(balancer, rank, skip=odd)
    one_pass(balancer, rank)


def no_gradients(rank: int, odd: bool) -> None:
    with torch.set_grad_enabled(not odd):
        one_pass(whole(), rank)


def no_gradients_in_the_step(rank: int, odd: bool) -> None:
    """Prepared alike."""
    step = whole().prepare(LENGTHS[rank])
    with torch.set_grad_enabled(not odd):
        x = step.route(heads(rank).requires_grad_())
    step.restore(step.attention(x, x, x)).sum().backward()


def one_sample_more(rank: int, odd: bool) -> None:
    """A logging rank runs a forward pass more, by itself, of a step that is alive."""
    step = whole().prepare(LENGTHS[rank])
    x = heads(rank).requires_grad_()
    if odd:
        with torch.no_grad():
            step.route(x)
    step.restore(step.route(x)).sum().backward()


def autocast(rank: int, odd: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        one_pass(whole(), rank)


def other_balancer(rank: int, odd: bool) -> None:
    teacher, student = whole(), whole()
    (teacher if odd else student).prepare(LENGTHS[rank])


def other_lengths(rank: int, odd: bool) -> None:
    step = whole().prepare(LENGTHS[rank])
    step.route(heads(rank), lengths=list(reversed(LENGTHS[rank])) if odd else LENGTHS[rank])


def gradients_of_some(rank: int, odd: bool) -> bool:
    """Only the odd rank's rows require gradients; those are right."""
    step = whole().prepare(LENGTHS[rank])
    x = heads(rank).requires_grad_(odd)
    y = step.route(x)
    step.restore(step.attention(y, y, y).square()).sum().backward()
    if not odd:
        return x.grad is None
    reference = heads(rank).requires_grad_()
    local_attention(LENGTHS[rank])(reference, reference, reference).square().sum().backward()
    assert x.grad is not None and reference.grad is not None
    return torch.allclose(x.grad, reference.grad, atol=1e-5)


CASES = {
    "dtype of an empty tensor": Case(
        "a rank without rows routes float32, the others bfloat16",
        route_dtype,
        2,
        "DisagreementError",
        r"rank 0 made step 1, call 1: route of tokens: bfloat16 \(8,\).*; rank 2 made step 1, call 1: .*: float32",
    ),
    "half precisions": Case(
        "float16 on one rank, bfloat16 on the others", route_half, 1, "DisagreementError", "rank 1 .* float16"
    ),
    "integer width": Case(
        "int32 on one rank, int64 on the others", route_integers, 2, "DisagreementError", "rank 2 .* int32"
    ),
    "channels": Case(
        "4 channels on a rank without rows, 8 on the others", route_channels, 2, "DisagreementError", r"rank 2 .*\(4,\)"
    ),
    "rows": Case("one row too many on one rank", route_rows, 1, "LengthsError", "rank 1: expected a tensor of 12 rows"),
    "rows of a batch": Case(
        "one row too many in one tensor of a batch",
        batch_rows,
        1,
        "LengthsError",
        "rank 1: expected a tensor of 12 rows",
    ),
    "order in a batch": Case(
        "the streams of a batch in another order on one rank",
        batch_order,
        1,
        "DisagreementError",
        "'text'.*'visual'",
    ),
    "order of routes": Case(
        "text and visual routed in the other order", route_order, 1, "DisagreementError", "'text'.*'visual'"
    ),
    "widths of q and k": Case(
        "k twice as wide as q",
        widths,
        1,
        "ConfigurationError",
        "rank 1: .* the same of k, got width 16",
    ),
    "heads of v": Case(
        "v with twice the heads",
        value_heads,
        0,
        "ConfigurationError",
        "rank 0: k has 6 heads, .* of v, got 12",
    ),
    "rows of k and v": Case("k and v with a row too many", key_rows, 1, "LengthsError", "rank 1: .* tokens, k has"),
    "scale": Case("another scale", scale, 2, "DisagreementError", r"scale 0\.5"),
    "causal": Case("causal on one rank", causal, 1, "DisagreementError", "causal"),
    "heads": Case("fewer heads on one rank", number_of_heads, 2, "DisagreementError", "4 heads"),
    "dtype of attention": Case("bfloat16 on one rank", attention_dtype, 1, "DisagreementError", "bfloat16"),
    "gradients of attention": Case(
        "q, k and v require gradients on one rank only",
        attention_gradients,
        2,
        "DisagreementError",
        r"rank [01] waits in .*scale [\d.]+, 3 tensors of float32, width 8; rank 2 .*with gradients",
    ),
    "one layer more": Case(
        "one attention call more",
        one_layer_more,
        1,
        "DisagreementError",
        "restore.*rank 1 .*attention|rank 1 .*attention.*restore",
    ),
    "kinds of prepare": Case(
        "prepare_micro_batches on one rank",
        prepares,
        1,
        "DisagreementError",
        "rank 1 has method 'prepare_micro_batches'",
    ),
    "order of backward": Case("two losses in the other order", backward_order, 1, "DisagreementError", "backward of"),
    "order of backward, recomputed": Case(
        "two losses of a model with recomputed blocks, in the other order",
        backward_order_of_models,
        1,
        "DisagreementError",
        r"step 1, (backward of )?call \d+: attention.*step 2, |step 2, (backward of )?call \d+: attention.*step 1, ",
    ),
    "validation passes": Case(
        "two passes without gradients on one rank, three on the others",
        validation_passes,
        1,
        "DisagreementError",
        "gradients_enabled",
    ),
    "skipped backward": Case(
        "no backward pass on one rank",
        skipped_backward,
        1,
        "DisagreementError",
        r"rank 1 waits in prepare of step 2.*waits in step 1, back|step 1, back.*rank 1 waits in prepare of step 2",
    ),
    "skipped backward, nothing moved": Case(
        "the same, under a plan that moves nothing",
        skipped_backward_at_home,
        1,
        "DisagreementError",
        r"rank 0 made step 1, backward of call \d+: restore of .*; rank 1 made prepare of step 2",
    ),
    "no_grad": Case("gradients disabled on one rank", no_gradients, 1, "DisagreementError", "gradients_enabled False"),
    "no_grad in the step": Case(
        "gradients disabled on one rank after prepare",
        no_gradients_in_the_step,
        1,
        "DisagreementError",
        r"rank [02] waits in step 1, call 1: route .*\(6, 8\)(;|$)",
    ),
    "one forward pass more": Case(
        "one rank alone routes the rows once more", one_sample_more, 1, "DisagreementError", "rank 1 waits in step 1"
    ),
    "autocast": Case("autocast on one rank", autocast, 2, "DisagreementError", "rank 2 has autocast 'torch.bfloat16'"),
    "another balancer": Case(
        "another balancer's prepare",
        other_balancer,
        1,
        "DisagreementError",
        r"rank . waits in prepare of step 1 by balancer (\S+); rank . waits in prepare of step 1 by balancer (?!\1)",
    ),
    "other lengths": Case(
        "rows of a batch in another order",
        other_lengths,
        0,
        "LengthsError",
        r"rank 0: the step was prepared for tokens \[9, 6\], got \[6, 9\]",
    ),
    "gradients of some rows": Case("one rank's rows require gradients, the others' do not", gradients_of_some, 0, ""),
}
