"""Routing checked against a direct construction from the plan, on the ranks of a test. Faults come back as text."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from plan_cases import random_plan, random_ranks
from torch import Tensor

from knapformer import Balancer, CostModel, Lengths, Plan
from knapformer.execution.transport import Meter

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.uint8,
)
TRAILING = ((), (0,), (4,), (3, 5))
STREAMS = ("text", "visual")
CORNERS: tuple[list[list[int]], ...] = ([], [[]], [[0, 0]], [[1]], [[0], [7, 1, 0]], [[], [1, 0, 5], [], [20]])
"""Lengths of the first ranks; the others have none."""


def steps(world_size: int, seeds: Sequence[int]) -> Iterator[list[list[int]]]:
    """Lengths per rank: corner cases, then random ones."""
    for some in CORNERS:
        if len(some) <= world_size:
            yield some + [[]] * (world_size - len(some))
    for seed in seeds:
        yield random_ranks(random.Random(seed), world_size)


def planned(lengths: Lengths) -> Plan:
    """A random plan that depends on nothing but the lengths."""
    ranks = lengths.to_lists()
    return random_plan(ranks, 5, random.Random(str(ranks)))


def make_balancer(planner=planned) -> Balancer:
    return Balancer(CostModel(hidden=40, num_heads=5), planner=planner, meter=Meter())


def content(num_rows: int, trailing: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, NaNs of any payload among them; the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, *trailing)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    size = (*shape, dtype.itemsize)
    return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8).view(dtype).squeeze(-1)


def spread(x: Tensor) -> Tensor:
    """The same values, not contiguous."""
    wide = torch.stack([x, x], dim=-1)[..., 1]
    return wide.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 and x.numel() else wide


def same(a: Tensor, b: Tensor) -> bool:
    """Of the same shape and dtype, and bitwise equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.cat([x.detach().reshape(-1), x.new_empty(0)]).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def packed(plan: Plan, rank: int) -> list[tuple[int, int, int]]:
    """(sequence, start, end) that ``rank`` holds, in packed order: whole sequences first, then parts of split ones."""
    held = [
        (bool(plan.is_split[i]), i, s.start, s.end)
        for i in range(plan.num_sequences)
        for s in plan.placement(i).segments
        if s.rank == rank
    ]
    return [own[1:] for own in sorted(held)]


def windows(lengths: Lengths, stream: str | None) -> tuple[list[int], list[int], list[int]]:
    """First and last token of a stream inside each sequence, and the sequence's first row in a tensor of all ranks."""
    starts = lengths.stream_starts()
    at = 0 if stream is None else STREAMS.index(stream)
    low, high = starts[at].tolist(), starts[-1 if stream is None else at + 1].tolist()
    first = [sum(high[:i]) - sum(low[:i]) for i in range(len(low))]
    return low, high, first


def direct(everything: Tensor, plan: Plan, lengths: Lengths, rank: int, stream: str | None = None) -> Tensor:
    """The rows that ``rank`` should hold, out of a tensor of all ranks' rows."""
    low, high, first = windows(lengths, stream)
    parts = [everything[:0]]
    for i, start, end in packed(plan, rank):
        a, b = max(start, low[i]), min(end, high[i])
        parts.append(everything[first[i] + a - low[i] : first[i] + max(a, b) - low[i]])
    return torch.cat(parts)


def at_home(everything: Tensor, lengths: Lengths, rank: int, stream: str | None = None) -> Tensor:
    low, high, _ = windows(lengths, stream)
    a, b = lengths.offsets[rank : rank + 2].tolist()
    before, own = (sum(high[p:q]) - sum(low[p:q]) for p, q in ((0, a), (a, b)))
    return everything[before : before + own]


def rows_leaving(plan: Plan, lengths: Lengths, rank: int, stream: str | None = None) -> int:
    low, high, _ = windows(lengths, stream)
    placements = [plan.placement(i) for i in range(plan.num_sequences)]
    return sum(
        max(0, min(s.end, high[p.id]) - max(s.start, low[p.id]))
        for p in placements
        for s in p.segments
        if p.home == rank != s.rank
    )


def check_routing(rank: int, world_size: int, seeds: Sequence[int], wrong: str = "") -> list[str]:
    """Law 2 for every dtype, trailing shape and layout; what does not hold, as text.

    Args:
        wrong: what a faulty transport would do, for the negative control: "permute" rows or "promote" to floats.
    """
    balancer, faults = make_balancer(), []
    for ranks in steps(world_size, seeds):
        step = balancer.prepare(ranks[rank], num_rows=sum(ranks[rank]))
        for dtype, trailing in product(DTYPES, TRAILING):
            everything = content(step.lengths.num_tokens, trailing, dtype, seed=len(str(ranks)))
            x = at_home(everything, step.lengths, rank)
            faults += [
                f"{ranks} {dtype} {trailing}: {fault}"
                for fault in check_tensor(step, balancer.channel.meter, everything, x, spoil(wrong))
            ]
    return faults


def check_tensor(step, meter: Meter, everything: Tensor, x: Tensor, change, stream: str | None = None) -> list[str]:
    plan, lengths, rank = step.plan, step.lengths, step.rank
    faults = []
    for name, given in (("contiguous", x), ("spread", spread(x))):
        meter.clear()
        routed = change(step.route(given, stream=stream))
        row_bytes = int(torch.Size(x.shape[1:]).numel()) * x.element_size()
        if meter.bytes_sent != rows_leaving(plan, lengths, rank, stream) * row_bytes:
            faults.append(f"{name}: sent {meter.bytes_sent} bytes")
        if not same(routed, direct(everything, plan, lengths, rank, stream)):
            faults.append(f"{name}: wrong rows")
        if not same(step.restore(routed, stream=stream), x):
            faults.append(f"{name}: restored otherwise")
        if not same(given, x):
            faults.append(f"{name}: the input was changed")
    return faults


def spoil(wrong: str):
    if wrong == "permute":
        return lambda x: x.flip(0)
    if wrong == "promote":
        return lambda x: x.float().to(x.dtype)
    return lambda x: x


def check_together(rank: int, world_size: int, seeds: Sequence[int]) -> list[str]:
    """Several tensors in one call: one exchange per dtype, and none where nothing moves."""
    balancer, faults = make_balancer(), []
    meter = balancer.channel.meter
    for ranks in steps(world_size, seeds):
        step = balancer.prepare(ranks[rank])
        num_tokens = step.lengths.num_tokens
        everything = [content(num_tokens, (), d, seed=1) for d in (torch.int64, torch.bfloat16, torch.int64)]
        mine = [at_home(x, step.lengths, rank) for x in everything]
        meter.clear()
        routed = step.route(*mine)
        moves = any(rows_leaving(step.plan, step.lengths, r) for r in range(world_size))
        if meter.num_exchanges != (2 if moves else 0):
            faults.append(f"{ranks}: {meter.num_exchanges} exchanges")
        if not all(same(y, direct(x, step.plan, step.lengths, rank)) for x, y in zip(everything, routed, strict=True)):
            faults.append(f"{ranks}: wrong rows")
        index = [n for n, (i, a, b) in enumerate(merged(packed(step.plan, rank))) for _ in range(b - a)]
        if step.sequence_index.tolist() != index:
            faults.append(f"{ranks}: sequence_index {step.sequence_index.tolist()}")
    return faults


def merged(held: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """One entry for each sequence, with as many tokens as its parts together."""
    tokens: dict[int, int] = {}
    for i, start, end in held:
        tokens[i] = tokens.get(i, 0) + end - start
    return [(i, 0, count) for i, count in tokens.items()]


def check_streams(rank: int, world_size: int, seeds: Sequence[int]) -> list[str]:
    """Streams with tensors of their own, and the index of their rows."""
    balancer, faults = make_balancer(), []
    for ranks in steps(world_size, seeds):
        rng = random.Random(str(ranks))
        text = [[rng.randint(0, length) for length in own] for own in ranks]
        own = {"text": text[rank], "visual": [n - t for n, t in zip(ranks[rank], text[rank], strict=True)]}
        step = balancer.prepare(own)
        for stream, dtype in product((*STREAMS, None), (torch.float32, torch.int64)):
            num_rows = sum(high - low for low, high in zip(*windows(step.lengths, stream)[:2], strict=True))
            everything = content(num_rows, (3,), dtype, seed=2)
            x = at_home(everything, step.lengths, rank, stream)
            found = check_tensor(step, balancer.channel.meter, everything, x, spoil(""), stream)
            faults += [f"{ranks} {stream}: {fault}" for fault in found]
        kinds = stream_kinds(step.plan, step.lengths, rank)
        for kind, rows in enumerate((step.streams.text, step.streams.visual)):
            if rows.tolist() != [row for row, k in enumerate(kinds) if k == kind]:
                faults.append(f"{ranks}: rows of {STREAMS[kind]} are {rows.tolist()}")
    return faults


def stream_kinds(plan: Plan, lengths: Lengths, rank: int) -> list[int]:
    """For each packed row, 0 for text and 1 for visual."""
    border = windows(lengths, "text")[1]
    return [int(position >= border[i]) for i, start, end in packed(plan, rank) for position in range(start, end)]


def check_gradients(rank: int, world_size: int, seeds: Sequence[int]) -> list[str]:
    """The gradient of ``route`` is ``restore``, and the other way round, bitwise."""
    balancer, faults = make_balancer(), []
    for ranks in steps(world_size, seeds):
        step = balancer.prepare(ranks[rank])
        for dtype in (torch.float32, torch.bfloat16):
            everything, gradient = (content(step.lengths.num_tokens, (3,), dtype, seed=s) for s in (3, 4))
            x = at_home(everything, step.lengths, rank).clone().requires_grad_()
            step.route(x).backward(direct(gradient, step.plan, step.lengths, rank))
            y = direct(everything, step.plan, step.lengths, rank).requires_grad_()
            step.restore(y).backward(at_home(gradient, step.lengths, rank))
            expected = at_home(gradient, step.lengths, rank), direct(gradient, step.plan, step.lengths, rank)
            if not (same(x.grad, expected[0]) and same(y.grad, expected[1])):
                faults.append(f"{ranks} {dtype}")
    return faults


def check_conditioning(rank: int, world_size: int, seeds: Sequence[int], wrong: str = "") -> list[str]:
    """Rows reach every holder, and their gradients are summed at home: in order of rank, in float32 at least.

    Args:
        wrong: "own type" expects sums in the gradients' own type instead, for the negative control.
    """
    balancer, faults = make_balancer(), []
    for ranks in steps(world_size, seeds):
        num_sequences = sum(len(own) for own in ranks)
        rng = random.Random(str(ranks))
        ragged = [rng.randint(0, 3) for _ in range(num_sequences)]
        offset = sum(len(own) for own in ranks[:rank])
        mine = slice(offset, offset + len(ranks[rank]))
        step = balancer.prepare(ranks[rank], conditioning={"context": ragged[mine]})
        ids = [i for i, _, _ in merged(packed(step.plan, rank))]
        if step.conditioning_lengths("context") != [ragged[i] for i in ids] or step.sequence_ids.tolist() != ids:
            faults.append(f"{ranks}: sequences {step.sequence_ids}, rows {step.conditioning_lengths('context')}")
        for dtype, name in product((torch.float64, torch.float32, torch.bfloat16), (None, "context")):
            rows = [1] * num_sequences if name is None else ragged
            found = check_rows(step, rows, dtype, name, wrong)
            faults += [f"{ranks} {dtype} {name}: {fault}" for fault in found]
    return faults


def check_rows(step, rows: list[int], dtype: torch.dtype, name: str | None, wrong: str) -> list[str]:
    generator = torch.Generator().manual_seed(sum(rows))
    everything = torch.randn(sum(rows), 4, generator=generator, dtype=torch.float64).to(dtype)
    weights = [torch.randn(sum(rows), 4, generator=generator, dtype=torch.float64).to(dtype) for _ in range(9)]
    holders = [{i for i, _, _ in packed(step.plan, r)} for r in range(step.num_ranks)]
    ids = [i for i, _, _ in merged(packed(step.plan, step.rank))]
    of = [slice(sum(rows[:i]), sum(rows[: i + 1])) for i in range(len(rows))]
    a, b = step.lengths.offsets[step.rank : step.rank + 2].tolist()
    x = everything[sum(rows[:a]) : sum(rows[:b])].clone().requires_grad_()
    y = step.route_conditioning(x, name=name)
    faults = [] if same(y, torch.cat([everything[:0], *(everything[of[i]] for i in ids)])) else ["wrong rows"]
    y.backward(torch.cat([everything[:0], *(weights[step.rank][of[i]] for i in ids)]))
    wide = dtype if wrong == "own type" else torch.promote_types(dtype, torch.float32)
    total = torch.zeros(sum(rows), 4, dtype=wide)
    for r, held in enumerate(holders):
        for i in held:
            total[of[i]] += weights[r][of[i]]
    expected = total.to(dtype)[sum(rows[:a]) : sum(rows[:b])]
    return faults if same(x.grad, expected) else [*faults, "wrong gradient"]
