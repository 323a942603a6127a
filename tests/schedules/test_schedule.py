"""Exchanges of all ranks, carried out in NumPy: labelled units arrive where the plan wants them, and come back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import random_plan, random_ranks

from knapformer.errors import ConfigurationError
from knapformer.given.lengths import Lengths
from knapformer.plans.plan import Plan
from knapformer.schedules.attention import AttentionSchedule, attention_schedule
from knapformer.schedules.tokens import Blocks, Exchange, RankTokens, conditioning_exchange, token_exchange

SEEDS = range(43)
"""From 40 on, every rank has dozens of sequences: sorting fewer than 17 numbers is stable by chance."""
NOTHING = -1


def units(blocks: Blocks) -> list[int]:
    columns = (blocks.start, blocks.outer, blocks.outer_stride, blocks.inner, blocks.inner_stride)
    return [
        start + o * outer_stride + i * inner_stride
        for start, outer, outer_stride, inner, inner_stride in zip(*(c.tolist() for c in columns), strict=True)
        for o in range(outer)
        for i in range(inner)
    ]


def carry_out(exchanges: list[Exchange], inputs: list[list[int]]) -> list[list[int]]:
    """What every rank has afterwards; sums where an exchange adds up, else each unit is written once."""
    mail: dict[tuple[int, int], list[int]] = {}
    for rank, (exchange, own) in enumerate(zip(exchanges, inputs, strict=True)):
        assert len(own) == exchange.num_in
        assert rank not in exchange.peers.tolist() and (exchange.send_counts + exchange.receive_counts).all()
        leaving = iter([own[i] for i in units(exchange.send)])
        for other, count in zip(exchange.peers.tolist(), exchange.send_counts.tolist(), strict=True):
            mail[rank, other] = [next(leaving) for _ in range(count)]
        assert not list(leaving)
    return [receive(rank, exchange, inputs[rank], mail) for rank, exchange in enumerate(exchanges)]


def receive(rank: int, exchange: Exchange, own: list[int], mail: dict[tuple[int, int], list[int]]) -> list[int]:
    out = [0 if exchange.adds_up else NOTHING] * exchange.num_out
    kept = [own[i] for i in units(exchange.keep_from)]
    arriving = []
    assert {other for (other, to), sent in mail.items() if to == rank and sent} <= set(exchange.peers.tolist())
    for other, count in zip(exchange.peers.tolist(), exchange.receive_counts.tolist(), strict=True):
        assert len(mail[other, rank]) == count, f"{other} -> {rank}"
        arriving += mail[other, rank]
    for where, values in ((exchange.keep_to, kept), (exchange.receive, arriving)):
        for at, value in zip(units(where), values, strict=True):
            assert exchange.adds_up or out[at] == NOTHING, "written twice"
            out[at] = out[at] + value if exchange.adds_up else value
    assert NOTHING not in out, "not written"
    return out


def case(seed: int, num_heads: int = 5, num_kv_heads: int | None = None) -> tuple[Plan, Lengths, list[RankTokens]]:
    rng = random.Random(seed)
    ranks = random_ranks(rng, rng.randint(1, 6)) if seed < 40 else many_sequences(rng)
    plan = random_plan(ranks, num_heads, rng, num_kv_heads=num_kv_heads)
    return plan, Lengths.from_ranks(ranks), [RankTokens.of(plan, rank) for rank in range(plan.world_size)]


def many_sequences(rng: random.Random) -> list[list[int]]:
    """Lengths of two ranks with 60 sequences each."""
    return [[rng.randint(0, 9) for _ in range(60)] for _ in range(2)]


def held(tokens: RankTokens) -> list[tuple[int, int]]:
    """(sequence, position) of each packed row."""
    columns = zip(tokens.sequence.tolist(), tokens.start.tolist(), tokens.end.tolist(), strict=True)
    return [(sequence, position) for sequence, start, end in columns for position in range(start, end)]


def at_home(lengths: Lengths, rank: int) -> list[tuple[int, int]]:
    first, last = lengths.offsets[rank : rank + 2].tolist()
    return [(i, position) for i in range(first, last) for position in range(int(lengths.tokens[i]))]


def label(sequence: int, position: int, head: int = 0) -> int:
    return (sequence * 1000 + position) * 100 + head


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_are_whole_sequences_first_then_parts_of_split_ones_by_id(seed):
    plan, _, tokens = case(seed)
    for rank, own in enumerate(tokens):
        segments = [
            (bool(plan.is_split[i]), i, segment.start, segment.end)
            for i in range(plan.num_sequences)
            for segment in plan.placement(i).segments
            if segment.rank == rank
        ]
        columns = (own.sequence.tolist(), own.start.tolist(), own.end.tolist())
        assert list(zip(*columns, strict=True)) == [part[1:] for part in sorted(segments)]
        assert own.num_whole == sum(not split for split, *_ in segments)


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_go_where_they_are_held_and_come_back(seed):
    plan, lengths, tokens = case(seed)
    exchanges = [token_exchange(plan, lengths, own, rank) for rank, own in enumerate(tokens)]
    home = [[label(*token) for token in at_home(lengths, rank)] for rank in range(plan.world_size)]
    routed = carry_out(exchanges, home)
    assert routed == [[label(*token) for token in held(own)] for own in tokens]
    assert carry_out([e.reversed for e in exchanges], routed) == home
    assert len({e.is_local for e in exchanges}) == 1
    assert exchanges[0].is_local == (not any(e.send_counts.any() for e in exchanges))


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_streams_go_alone(seed):
    plan, lengths, tokens = case(seed)
    rng = random.Random(seed)
    text = [[rng.randint(0, n) for n in own] for own in lengths.to_lists()]
    visual = [[n - t for n, t in zip(*own, strict=True)] for own in zip(lengths.to_lists(), text, strict=True)]
    lengths = Lengths.from_ranks([{"text": t, "visual": v} for t, v in zip(text, visual, strict=True)])
    border = lengths.streams[0][1]
    for stream, wanted in (("text", True), ("visual", False)):
        exchanges = [token_exchange(plan, lengths, own, rank, stream) for rank, own in enumerate(tokens)]
        chosen = [
            [[label(i, p) for i, p in rows if (p < border[i]) == wanted] for rows in table]
            for table in (
                [at_home(lengths, rank) for rank in range(plan.world_size)],
                [held(own) for own in tokens],
            )
        ]
        assert carry_out(exchanges, chosen[0]) == chosen[1]
        assert carry_out([e.reversed for e in exchanges], chosen[1]) == chosen[0]
    with pytest.raises(ConfigurationError, match=r"no stream 'audio': the lengths have \['text', 'visual'\]"):
        token_exchange(plan, lengths, tokens[0], 0, "audio")


@pytest.mark.parametrize("seed", SEEDS)
def test_conditioning_goes_to_all_holders_and_sums_come_back(seed):
    plan, lengths, tokens = case(seed)
    rows = np.asarray([random.Random(seed + i).randint(0, 3) for i in range(plan.num_sequences)], np.int64)
    exchanges = [conditioning_exchange(plan, lengths, own, rank, rows) for rank, own in enumerate(tokens)]
    mine = [range(*lengths.offsets[rank : rank + 2].tolist()) for rank in range(plan.world_size)]
    home = [[label(i, row) for i in own for row in range(rows[i])] for own in mine]
    copied = carry_out(exchanges, home)
    assert copied == [[label(i, row) for i in own.sequence_ids.tolist() for row in range(rows[i])] for own in tokens]
    holders = [sum(i in own.sequence_ids for own in tokens) for i in range(plan.num_sequences)]
    summed = [[label(i, row) * holders[i] for i in own for row in range(rows[i])] for own in mine]
    assert carry_out([e.reversed for e in exchanges], copied) == summed


def attend(plan: Plan, tokens: list[RankTokens]) -> list[AttentionSchedule]:
    return [attention_schedule(plan, own, rank) for rank, own in enumerate(tokens)]


def split_rows(plan: Plan, own: RankTokens, num_heads: int) -> list[int]:
    rows = held(own)[own.num_whole_rows :]
    assert all(plan.is_split[i] for i, _ in rows)
    return [label(i, position, head) for i, position in rows for head in range(num_heads)]


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(5, 5), (6, 2), (4, 1)])
@pytest.mark.parametrize("seed", SEEDS)
def test_heads_go_to_their_tiles_and_come_back(seed, num_heads, num_kv_heads):
    plan, _, tokens = case(seed, num_heads, num_kv_heads)
    schedules = attend(plan, tokens)
    q = [split_rows(plan, own, num_heads) for own in tokens]
    k = [split_rows(plan, own, num_kv_heads) for own in tokens]
    received_q = carry_out([s.queries for s in schedules], q)
    received_k = carry_out([s.keys for s in schedules], k)
    for rank, schedule in enumerate(schedules):
        check_entries(plan, rank, schedule, received_q[rank], received_k[rank])
    assert carry_out([s.queries.reversed for s in schedules], received_q) == q


def check_entries(plan: Plan, rank: int, schedule: AttentionSchedule, q: list[int], k: list[int]) -> None:
    """Entries are the heads of the rank's tiles, and each finds the keys of its head."""
    entries_q, entries_k = (
        [values[end - n : end] for n, end in zip(lengths.tolist(), np.cumsum(lengths).tolist(), strict=True)]
        for values, lengths in ((q, schedule.query_lengths), (k, schedule.key_lengths))
    )
    expected = [
        (i, head, tile.query_start, tile.query_end)
        for i in np.flatnonzero(plan.is_split).tolist()
        for tile in plan.placement(i).tiles
        if tile.rank == rank
        for head in range(tile.head_start, tile.head_end)
    ]
    group = plan.num_heads // plan.num_kv_heads
    assert entries_q == [[label(i, p, head) for p in range(a, b)] for i, head, a, b in expected]
    for (i, head, _, _), entry in zip(expected, schedule.key_of_query.tolist(), strict=True):
        assert entries_k[entry] == [label(i, p, head // group) for p in range(int(plan.lengths[i]))]


def test_notices_a_wrong_exchange():
    """The negative control: two blocks that change places, and one that is dropped."""
    plan, lengths, tokens = next(c for c in map(case, SEEDS) if len(RankTokens.of(c[0], 0).sequence) > 2)
    exchanges = [token_exchange(plan, lengths, own, rank) for rank, own in enumerate(tokens)]
    home = [[label(*token) for token in at_home(lengths, rank)] for rank in range(plan.world_size)]
    expected = [[label(*token) for token in held(own)] for own in tokens]
    rank = next(r for r, e in enumerate(exchanges) if len(e.receive.start) > 1)
    good = exchanges[rank]
    exchanges[rank] = replace(good, receive=good.receive.take(np.arange(len(good.receive.start))[::-1]))
    with pytest.raises(AssertionError):
        assert carry_out(exchanges, home) == expected
    exchanges[rank] = replace(
        good,
        receive=good.receive.take(np.arange(len(good.receive.start) - 1)),
        source=good.source[:-1],
    )
    with pytest.raises((AssertionError, ValueError)):
        carry_out(exchanges, home)
