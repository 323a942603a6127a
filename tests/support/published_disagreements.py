"""What ranks can do differently by a mistake with a ``SequenceBalancer``, and what they are told (law 9)."""

from __future__ import annotations

from dataclasses import replace

import torch
from disagreement_cases import HEADS, LENGTHS, WIDTH, Case, heads, rows
from torch import Tensor

from knapformer import SequenceBalancer

BAGS = "g1n1+g2n1"


def planned(rank: int, bags: str = "g3n1") -> SequenceBalancer:
    balancer = SequenceBalancer(bags)
    balancer.plan_routing(LENGTHS[rank], HEADS * WIDTH)
    return balancer


def chunks(balancer: SequenceBalancer, rank: int) -> Tensor:
    """(T, heads, width) of this rank's chunks."""
    return balancer.route(heads(rank))[1]


def other_bags(rank: int, odd: bool) -> None:
    SequenceBalancer("g1n3" if odd else "g3n1")


def route_order(rank: int, odd: bool) -> None:
    balancer, x = planned(rank), rows(rank)
    y = balancer.route(x)[1]
    if odd:
        balancer.route(x)
    else:
        balancer.reverse_route(y)


def route_dtype(rank: int, odd: bool) -> None:
    planned(rank).route(rows(rank, dtype=torch.float32 if odd else torch.bfloat16))


def feature_width(rank: int, odd: bool) -> None:
    planned(rank).route(rows(rank), [rows(rank, 4 if odd else 6)])


def route_rows(rank: int, odd: bool) -> None:
    x = rows(rank)
    planned(rank).route(torch.cat([x, x[:1]]) if odd else x)


def attention_dtype(rank: int, odd: bool) -> None:
    balancer = planned(rank)
    x = chunks(balancer, rank)
    balancer.pre_attn(*[x.bfloat16() if odd else x] * 3)


def attention_rows(rank: int, odd: bool) -> None:
    balancer = planned(rank)
    x = chunks(balancer, rank)
    balancer.pre_attn(*[torch.cat([x, x[:1]]) if odd else x] * 3)


def one_layer_more(rank: int, odd: bool) -> None:
    balancer = planned(rank)
    x = chunks(balancer, rank)
    for _ in range(2 if odd else 1):
        _, q, _, _ = balancer.pre_attn(x, x, x)
        _, x = balancer.post_attn(q)
    balancer.reverse_route(x)
    balancer.plan_routing(LENGTHS[rank], HEADS * WIDTH)


def gradients_of_one(rank: int, odd: bool) -> None:
    balancer = planned(rank)
    x = chunks(balancer, rank).requires_grad_(odd)
    _, q, _, _ = balancer.pre_attn(x, x, x)
    _, y = balancer.post_attn(q)
    if y.requires_grad:
        y.sum().backward()


def lone_bags_skip_attention(rank: int, _odd: bool) -> bool:
    """A rank alone in its bag makes no call of attention, and needs none: no disagreement, and rows come home."""
    balancer = planned(rank, BAGS)
    for _ in range(2):
        x = chunks(balancer, rank)
        if len(balancer._bag_ranks) > 1:
            _, q, _, _ = balancer.pre_attn(x, x, x)
            _, x = balancer.post_attn(q)
        home = balancer.reverse_route(x)[1]
        balancer.plan_routing(LENGTHS[rank], HEADS * WIDTH)
    return torch.equal(home, heads(rank))


DISAGREES = "DisagreementError"
CASES = {
    f"published: {name}": replace(case, what=f"SequenceBalancer: {case.what}")
    for name, case in {
        "bags": Case("other bags on one rank", other_bags, 1, DISAGREES, "rank 1 has bags 'g1n3'"),
        "order": Case("route in the place of reverse_route", route_order, 1, DISAGREES, "reverse_route"),
        "dtype": Case("an empty tensor of another dtype to its route", route_dtype, 2, DISAGREES, "bfloat16"),
        "width": Case("a feature of another width", feature_width, 2, DISAGREES, "width 4"),
        "rows": Case("a row too many to its route", route_rows, 1, "LengthsError", "rank 1: expected 12 rows"),
        "dtype of attention": Case("pre_attn in bfloat16 on one rank", attention_dtype, 0, DISAGREES, "bfloat16"),
        "rows of attention": Case("a row more to pre_attn", attention_rows, 2, "LengthsError", "rank 2: expected 9 "),
        "layer": Case("pre_attn and post_attn once more", one_layer_more, 1, DISAGREES, "pre_attn"),
        "gradients": Case("only one rank's q, k and v need gradients", gradients_of_one, 0, DISAGREES, "gradients"),
        "lone bag": Case("a rank alone in its bag skips pre_attn", lone_bags_skip_attention, 0, ""),
    }.items()
}
