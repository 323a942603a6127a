"""Steps as programs use them: no memory outlives its graph, inference, several steps and models at once."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch import run_ranks
from plan_cases import random_plan
from torch import Tensor
from torch.autograd import Function

from knapformer import Balancer, ConfigurationError, CostModel, Lengths, Plan
from knapformer.execution import exchange
from knapformer.execution.rows import rows
from knapformer.models import local_attention

LENGTHS = ([5, 17], [1, 9, 0])
HEADS, WIDTH = 4, 8


def make_balancer(seed: int = 0) -> Balancer:
    def plan(lengths):
        return random_plan(lengths.to_lists(), HEADS, random.Random(seed + lengths.num_tokens), split=0.8)

    return Balancer(CostModel(hidden=HEADS * WIDTH, num_heads=HEADS), planner=plan)


def tokens(lengths: list[int], num_heads: int = HEADS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), num_heads, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)


def layers(step: Any, x: Tensor, count: int = 2) -> Tensor:
    y = step.route(x * 1)
    for _ in range(count):
        y = step.attention(y.sin(), y, y.cos())
    return step.restore(y)


def alone(lengths: list[int], x: Tensor, count: int = 2) -> Tensor:
    attention = local_attention(lengths)
    for _ in range(count):
        x = attention(x.sin(), x, x.cos())
    return x


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-12, atol=1e-12)


class Witness:
    """An object that lives as long as a node of a graph."""


class Watched(Function):
    """The identity, with a witness."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, alive: list[weakref.ref]) -> Tensor:
        ctx.witness = Witness()
        alive.append(weakref.ref(ctx.witness))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def leaks(rank: int, with_backward: bool) -> list[bool]:
    """Which nodes of a graph live on, without the garbage collector's help, after it was run or dropped."""
    balancer, x = make_balancer(), tokens(LENGTHS[rank])
    alive: list[weakref.ref] = []
    gc.collect()
    gc.disable()
    try:
        step = balancer.prepare(LENGTHS[rank])
        y = Watched.apply(step.route(Watched.apply(x, alive)), alive)
        y = Watched.apply(step.attention(y.sin(), y, y.cos()), alive)
        y = Watched.apply(step.restore(y), alive)
        if with_backward:
            y.sum().backward()
        assert all(witness() is not None for witness in alive)
        del y, step
        return [witness() is not None for witness in alive]
    finally:
        gc.enable()


def leaks_with_a_cycle(rank: int) -> list[bool]:
    """The negative control: a token that stays with its ``Pending``."""
    apply = exchange._Finish.apply

    def keep(pending: Any, token: Tensor) -> Any:
        pending.token = token
        return apply(pending, token)

    exchange._Finish.apply = keep
    try:
        return leaks(rank, with_backward=False)
    finally:
        exchange._Finish.apply = apply


def scratch(rank: int) -> list[int]:
    """Sizes of the buffers that are kept after several steps, the first of which are small."""
    balancer, sizes = make_balancer(), []
    for factor in (1, 2, 9, 3, 9, 3, 9, 3, 9):
        lengths = [factor * n for n in LENGTHS[rank]]
        layers(balancer.prepare(lengths), tokens(lengths)).sum().backward()
        sizes.append(sum(buffer.numel() for buffer in balancer.channel.scratch._free))
    assert len(balancer.channel.scratch._free) in (1, 2)
    return sizes


def inference(rank: int) -> bool:
    step, x = make_balancer().prepare(LENGTHS[rank]), tokens(LENGTHS[rank])
    with torch.no_grad():
        y = layers(step, x)
    with torch.inference_mode():
        z = layers(step, x)
    return not y.requires_grad and torch.equal(y, layers(step, x)) and torch.equal(y, z)


def everything(step: Any, x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """All that a step keeps: routes of one tensor and of two, conditioning, two attentions, indices, streams."""
    text, visual = step.streams.split(step.route(x))
    both = step.streams.merge(text, visual) + step.route(y, y.cos())[1]
    own = rows(step.route_conditioning(table), step.row_index)
    first = step.attention(both, both.sin(), both + own)
    wide = torch.cat([first, first[:, :2]], dim=1)
    second = step.attention(wide, wide, wide.cos())
    return step.restore(second[:, :HEADS], second[:, 2:])[0] + table[step.sequence_index[:0]].sum()


def first_without_gradients(rank: int) -> bool:
    """A step that is first used in inference mode, or without gradients, by one model, and then trained with by two."""
    balancer, total, good = make_balancer(), LENGTHS[rank], []
    lengths = {"text": [n // 3 for n in total], "visual": [n - n // 3 for n in total]}
    x, y = tokens(total), tokens(total, seed=1)
    table = torch.randn(len(total), HEADS, WIDTH, dtype=torch.float64).requires_grad_()
    fresh = balancer.prepare(lengths)
    expected = everything(fresh, x, y, table)
    wanted = torch.autograd.grad(expected.square().sum(), (x, y, table))
    for mode in (torch.inference_mode, torch.no_grad):
        step = balancer.prepare(lengths)
        with mode():
            everything(step, x, y, table)
        output = everything(step, x, y, table)
        found = torch.autograd.grad(output.square().sum(), (x, y, table))
        good += [torch.equal(a, b) for a, b in zip((output, *found), (expected, *wanted), strict=True)]
    return all(good) and bool(wanted[2].abs().sum() > 0)


def twice(rank: int) -> bool:
    """Backward twice through one graph."""
    step, x = make_balancer().prepare(LENGTHS[rank]), tokens(LENGTHS[rank])
    y, expected = layers(step, x), alone(LENGTHS[rank], x)
    weight = tokens(LENGTHS[rank], seed=1).detach()
    (reference,) = torch.autograd.grad(expected, x, weight)
    (first,) = torch.autograd.grad(y, x, weight, retain_graph=True)
    (second,) = torch.autograd.grad(y, x, weight)
    return close(first, reference) and torch.equal(first, second)


def second_derivative(rank: int) -> str:
    step, x = make_balancer().prepare(LENGTHS[rank]), tokens(LENGTHS[rank])
    (gradient,) = torch.autograd.grad(layers(step, x).square().sum(), x, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def interleaved(rank: int) -> bool:
    """Two steps at once, and their backward passes in the other order."""
    balancer, other = make_balancer(), [4 * n for n in LENGTHS[rank]]
    a, b = balancer.prepare(LENGTHS[rank]), balancer.prepare(other)
    x, y = tokens(LENGTHS[rank]), tokens(other, seed=2)
    p, q = a.route(x), b.route(y)
    for _ in range(2):
        p, q = a.attention(p.sin(), p, p.cos()), b.attention(q.sin(), q, q.cos())
    p, q = a.restore(p), b.restore(q)
    (found_q,), (found_p,) = (torch.autograd.grad(z.sum(), of) for z, of in ((q, y), (p, x)))
    (wanted_p,) = torch.autograd.grad(alone(LENGTHS[rank], x).sum(), x)
    (wanted_q,) = torch.autograd.grad(alone(other, y).sum(), y)
    return close(found_p, wanted_p) and close(found_q, wanted_q) and close(p, alone(LENGTHS[rank], x))


def in_flight(rank: int) -> bool:
    """Two exchanges under way at once, awaited in the other order."""
    balancer = make_balancer()
    a, b = balancer.prepare(LENGTHS[rank]), balancer.prepare([4 * n for n in LENGTHS[rank]])
    xs = [torch.arange(64.0 * n).view(-1, 64) + rank for n in (sum(LENGTHS[rank]), 4 * sum(LENGTHS[rank]))]
    routes = [step._moves.route(("tokens", None), x.device, False, 1) for step, x in zip((a, b), xs, strict=True)]
    p, q = (exchange.start([x], route, balancer.channel) for x, route in zip(xs, routes, strict=True))
    (y,), (x,) = exchange.finish(q), exchange.finish(p)
    return torch.equal(x, a.route(xs[0])) and torch.equal(y, b.route(xs[1]))


def other_models(rank: int) -> bool:
    """One step for models of other heads: fewer, more, and grouped key-value heads."""
    step, lengths, good = make_balancer().prepare(LENGTHS[rank]), LENGTHS[rank], []
    for num_heads, num_kv_heads in ((4, 4), (6, 6), (6, 2), (2, 1), (1, 1)):
        q, k = tokens(lengths, num_heads), tokens(lengths, num_kv_heads, seed=1)
        y = step.restore(step.attention(step.route(q), step.route(k), step.route(k.sin())))
        expected = local_attention(lengths)(q, k, k.sin())
        found = torch.autograd.grad(y.square().sum(), (q, k))
        wanted = torch.autograd.grad(expected.square().sum(), (q, k))
        good += [close(y, expected), *(close(f, w) for f, w in zip(found, wanted, strict=True))]
    return all(good)


def fewer_heads_than_tiles(rank: int) -> bool:
    """With one head, a sequence that the plan splits by heads only ends up in one piece, on the rank of its tokens."""

    def plan(lengths: Lengths) -> Plan:
        tokens, homes = lengths.tokens.tolist(), lengths.homes.tolist()
        return Plan.from_placements(
            lengths=tokens,
            homes=homes,
            segments=[[(home, 0, n)] if n else [] for n, home in zip(tokens, homes, strict=True)],
            tiles=[[(0, 0, 1, 0, n), (1, 1, HEADS, 0, n)] if n else [] for n in tokens],
            world_size=lengths.num_ranks,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            planner="by heads",
        )

    step, good = Balancer(CostModel(hidden=HEADS * WIDTH, num_heads=HEADS), planner=plan).prepare(LENGTHS[rank]), []
    for num_heads in (HEADS, 1):
        q = tokens(LENGTHS[rank], num_heads)
        y, expected = layers(step, q), alone(LENGTHS[rank], q)
        found, wanted = (torch.autograd.grad(x.square().sum(), q)[0] for x in (y, expected))
        good += [close(y, expected), close(found, wanted)]
    return all(good)


def causal_query_tiles(rank: int) -> bool:
    """A token sees those before it where both ranks hold queries of one sequence, and where one holds all."""

    def plan(lengths: Lengths) -> Plan:
        return Plan.from_placements(
            lengths=[4, 4],
            homes=[0, 1],
            segments=[[(0, 0, 2), (1, 2, 4)]] * 2,
            tiles=[[(0, 0, HEADS, 0, 1), (1, 0, HEADS, 1, 4)], [(1, 0, HEADS, 0, 4)]],
            world_size=lengths.num_ranks,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            planner="by queries",
        )

    step = Balancer(CostModel(hidden=HEADS * WIDTH, num_heads=HEADS), planner=plan).prepare([4])
    q, attention = tokens([4], seed=rank), local_attention([4])
    x = step.route(q * 1)
    y = step.restore(step.attention(x.sin(), x, x.cos(), causal=True))
    expected, whole = attention(q.sin(), q, q.cos(), causal=True), attention(q.sin(), q, q.cos())
    found, wanted = (torch.autograd.grad(each.square().sum(), q)[0] for each in (y, expected))
    return close(y, expected) and close(found, wanted) and not close(y, whole)


def autocast(rank: int) -> bool:
    """q and k in float32, v in bfloat16, and rank 1 without heads: it sends and expects what the others do."""

    def plan(lengths: Lengths) -> Plan:
        total = lengths.tokens.tolist()
        return Plan.from_placements(
            lengths=total,
            homes=lengths.homes.tolist(),
            segments=[[(1, 0, n)] if n else [] for n in total],
            tiles=[[(0, 0, HEADS, 0, n)] if n else [] for n in total],
            world_size=lengths.num_ranks,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            planner="apart",
        )

    step = Balancer(CostModel(hidden=HEADS * WIDTH, num_heads=HEADS), planner=plan).prepare(LENGTHS[rank])
    q = tokens(LENGTHS[rank]).detach().float().requires_grad_()
    results = []
    for attention in (lambda *qkv: step.restore(step.attention(*step.route(*qkv))), local_attention(LENGTHS[rank])):
        with torch.autocast("cpu", torch.bfloat16):
            y = attention(q.sin(), q, q.cos().bfloat16())
        results.append((y, *torch.autograd.grad(y.float().square().sum(), q)))
    (found, gradient), (expected, reference) = results
    with pytest.raises(ConfigurationError, match=r"one dtype, got torch\.float32, torch\.float32, torch\.bfloat16"):
        step.attention(q, q, q.bfloat16())
    near = bool((gradient - reference).norm() < 0.02 * reference.norm())
    return found.dtype == expected.dtype == torch.bfloat16 and torch.equal(found, expected) and near


def some_need_gradients(rank: int) -> bool:
    """Only q, only k, only v requires a gradient."""
    step, lengths, good = make_balancer().prepare(LENGTHS[rank]), LENGTHS[rank], []
    for chosen in range(3):
        local = [tokens(lengths, seed=i).detach().requires_grad_(i == chosen) for i in range(3)]
        y = step.restore(step.attention(*step.route(*local)))
        (found,) = torch.autograd.grad(y.square().sum(), local[chosen])
        (wanted,) = torch.autograd.grad(local_attention(lengths)(*local).square().sum(), local[chosen])
        good.append(close(found, wanted))
    return all(good)


def a_batch_at_once(rank: int) -> bool:
    """The same as call by call, and one agreement. Only rank 0's text and rank 1's context needs gradients."""
    text, visual, context = (
        [n // 3 for n in LENGTHS[rank]],
        [n - n // 3 for n in LENGTHS[rank]],
        [2] * len(LENGTHS[rank]),
    )
    generator = torch.Generator().manual_seed(rank)

    def inputs() -> list[Tensor]:
        counts = (sum(text), sum(visual), len(text), sum(context), sum(LENGTHS[rank]))
        made = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in counts]
        for i, odd in ((0, 0), (3, 1)):
            made[i].requires_grad_(rank == odd)
        return [*made[:4], made[4].mul(100).long()]

    balancer = make_balancer()
    given = inputs()
    step = balancer.prepare({"text": text, "visual": visual}, conditioning={"context": context})
    apart = [
        step.route(given[0], stream="text"),
        step.route(given[1], stream="visual"),
        step.route_conditioning(given[2]),
        step.route_conditioning(given[3], name="context"),
        step.route(given[4]),
    ]
    before = step._calls._place
    routed = step.route_batch(
        tokens=[given[4]],
        streams={"text": [given[0]], "visual": [given[1]]},
        conditioning=[given[2]],
        named={"context": [given[3]]},
    )
    num_calls = step._calls._place - before
    together = [*routed.streams["text"], *routed.streams["visual"], *routed.conditioning]
    together += [*routed.named["context"], *routed.tokens]
    own = [x for x in given if x.requires_grad]
    gradients = []
    for ys in (apart, together):
        sum(y.sin().square().sum() for y in ys if y.requires_grad).backward()
        gradients.append([x.grad for x in own])
        own[0].grad = None
    return (
        all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))
        and [y.requires_grad for y in together] == [True, False, False, True, False]
        and all(torch.equal(a, b) and bool(a.abs().sum() > 0) for a, b in zip(*gradients, strict=True))
        and num_calls == 6  # an agreement and five exchanges
    )


def without_overlap(rank: int) -> bool:
    balancer = make_balancer()
    x = tokens(LENGTHS[rank])
    found = layers(balancer.prepare(LENGTHS[rank]), x)
    balancer.overlap = False
    return torch.equal(found, layers(balancer.prepare(LENGTHS[rank]), x))


CHECKS: tuple[Callable[[int], bool], ...] = (
    inference,
    first_without_gradients,
    twice,
    interleaved,
    in_flight,
    other_models,
    fewer_heads_than_tiles,
    causal_query_tiles,
    autocast,
    some_need_gradients,
    a_batch_at_once,
    without_overlap,
)


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {check.__name__: check(rank) for check in CHECKS}
    found["leaks"] = {way: leaks(rank, way) for way in (True, False)}
    found["leaks with a cycle"] = leaks_with_a_cycle(rank)
    found["scratch"] = scratch(rank)
    found["second derivative"] = second_derivative(rank)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_holds(found, check):
    assert [own[check] for own in found] == [True, True]


@pytest.mark.parametrize("with_backward", [True, False])
def test_nothing_outlives_its_graph(found, with_backward):
    assert not any(witness for own in found for witness in own["leaks"][with_backward])


def test_notices_a_cycle(found):
    assert all(own["leaks with a cycle"][0] for own in found)


def test_buffers_stop_growing(found):
    for own in found:
        sizes = own["scratch"]
        assert 0 < sizes[0] < sizes[-3] == sizes[-1], sizes


def test_second_derivatives_are_refused(found):
    assert all("once_differentiable" in own["second derivative"] for own in found)
