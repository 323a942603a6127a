"""Law 6: a bad input on one rank raises the same error on all of them, at once; a dead rank hangs nobody."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks, try_ranks

import knapformer.balancer
from knapformer import Balancer, CostModel, Lengths, Plan, Topology, errors, make_plan

COST = CostModel(hidden=32, num_heads=4)
LIMIT_S = 5.0
GOOD = [3, 0, 5]


@dataclass
class Case:
    """What one rank, the last, does otherwise, and the error that all ranks raise.

    Attributes:
        error: its type.
        text: regular expression of its text; ``{rank}`` is the last rank.
        bad: what the last rank gives to ``prepare``, instead of what the others give.
        good: what the others give.
        balancer: arguments of its ``Balancer``.
        on_all: arguments of all ranks' ``Balancer``.
        version: that it runs.
    """

    error: str
    text: str
    bad: dict[str, Any] = field(default_factory=dict)
    good: dict[str, Any] = field(default_factory=dict)
    balancer: dict[str, Any] = field(default_factory=dict)
    on_all: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


def good_plan(lengths: Lengths) -> Plan:
    return make_plan(lengths, planner="ulysses", cost=COST)


def another_plan(lengths: Lengths) -> Plan:
    return make_plan(lengths, planner="home", cost=COST)


def plan_for_others(lengths: Lengths) -> Plan:
    return make_plan([[1]] * lengths.num_ranks, planner="home", cost=COST)


def plan_for_other_homes(lengths: Lengths) -> Plan:
    everything = lengths.tokens.tolist()
    return make_plan([everything, *[[] for _ in range(lengths.num_ranks - 1)]], planner="home", cost=COST)


def plan_for_more_ranks(lengths: Lengths) -> Plan:
    return make_plan([*lengths.to_lists(), []], planner="home", cost=COST)


def no_plan(lengths: Lengths) -> Plan:
    raise KeyError("no plan here")


class Unlucky:
    """What a rank gives for its lengths by mistake: it fails in a way that nobody thought of."""

    def tolist(self) -> list[int]:
        raise KeyError("batch")


for planner in (good_plan, another_plan, plan_for_others, plan_for_other_homes, plan_for_more_ranks, no_plan):
    planner.__qualname__ = "planner"  # which is what ranks compare beforehand


CUSTOM = {"planner": good_plan}
STREAMS = {"text": [1, 0], "visual": [2, 5]}
CASES = {
    "negative": Case("LengthsError", r"rank {rank}: sequence 1: .* got -4", {"lengths": [3, -4]}),
    "fraction": Case("LengthsError", r"rank {rank}: sequence 0: .* got 2\.5", {"lengths": [2.5]}),
    "bool": Case("LengthsError", r"rank {rank}: sequence 2: .* got True", {"lengths": [1, 2, True]}),
    "too long": Case("LengthsError", rf"rank {{rank}}: sequence 0: .* got {2**31}", {"lengths": [2**31]}),
    "no list": Case("LengthsError", r"rank {rank}: lengths must be a list .* got None", {"lengths": None}),
    "tensor of floats": Case("LengthsError", r"rank {rank}: .* got 1\.0", {"lengths": torch.ones(2)}),
    "rows": Case("LengthsError", r"rank {rank}: .* 8 tokens, .* 9 rows", {"num_rows": 9}, {"num_rows": 8}),
    "no rows": Case("LengthsError", r"rank {rank}: .* 8 tokens, .* 0 rows", {"num_rows": 0}, {"num_rows": 8}),
    "lengths that fail": Case("RankError", r"rank {rank}: KeyError: 'batch'", {"lengths": Unlucky()}),
    "counts of streams": Case(
        "LengthsError",
        r"rank {rank}: every stream must list the same sequences",
        {"lengths": {"text": [1], "visual": [2, 5]}},
        {"lengths": STREAMS},
    ),
    "counts of conditioning": Case(
        "LengthsError",
        r"rank {rank}: conditioning 'context' lists 1 sequences, the lengths 3",
        {"conditioning": {"context": [1]}},
        {"conditioning": {"context": [1, 2, 3]}},
    ),
    "more conditioning than sequences": Case(
        "LengthsError",
        r"rank {rank}: conditioning 'context' lists 4 sequences, the lengths 2",
        {"lengths": [3, 5], "conditioning": {"context": [1, 2, 3, 4]}},
        {"conditioning": {"context": [1, 2, 3]}},
    ),
    "loader": Case("RankError", r"rank {rank}: OSError: disk on fire", {"error": OSError("disk on fire")}),
    "other streams": Case(
        "DisagreementError",
        r"rank {rank} names streams .*'image'",
        {"lengths": {"text": [1, 0], "image": [2, 5]}},
        {"lengths": STREAMS},
    ),
    "no streams": Case("DisagreementError", r"rank {rank} names streams", {"lengths": GOOD}, {"lengths": STREAMS}),
    "other conditioning": Case("DisagreementError", r"rank {rank} names", {"conditioning": {"context": [1, 2, 3]}}),
    "planner": Case(
        "DisagreementError", r"rank {rank} has planner 'whole', rank 0 has 'home'", balancer={"planner": "whole"}
    ),
    "cost": Case(
        "DisagreementError", r"rank {rank} has cost .*64", balancer={"cost": CostModel(hidden=64, num_heads=4)}
    ),
    "topology": Case("DisagreementError", r"rank {rank} has topology", balancer={"topology": "g1nSIZE"}),
    "ranks per node": Case(
        "DisagreementError",
        r"rank {rank} has topology \['', 3\], rank 0 has \['', 2\]",
        balancer={"topology": Topology(ranks_per_node=3)},
        on_all={"topology": Topology(ranks_per_node=2)},
    ),
    "key-value heads": Case(
        "DisagreementError", r"rank {rank} has num_kv_heads 2, rank 0 has None", balancer={"num_kv_heads": 2}
    ),
    "size of topology": Case(
        "DisagreementError", r"rank {rank} has ranks_in_a_balancing_group 1", balancer={"topology": "g1n1"}
    ),
    "no topology": Case("ConfigurationError", r"rank {rank}: .*banana", balancer={"topology": "banana"}),
    "topology of no divisor": Case(
        "ConfigurationError", r"rank {rank}: .* not a multiple", balancer={"topology": "g64n1"}
    ),
    "version": Case("DisagreementError", r"rank {rank} has version '0\.0\.1'", version="0.0.1"),
    "caps": Case(
        "CapacityError", r"^the step has \d+ tokens, max_tokens_per_rank allows", on_all={"max_tokens_per_rank": 2}
    ),
    "other caps": Case(
        "DisagreementError", r"rank {rank} has max_tokens_per_rank 2", balancer={"max_tokens_per_rank": 2}
    ),
    "one cap of many": Case(
        "DisagreementError",
        r"rank {rank} has max_tokens_per_rank\[1000\] 9, rank 0 has 8$",
        balancer={"max_tokens_per_rank": np.where(np.arange(2000) == 1000, 9, 8)},
        on_all={"max_tokens_per_rank": np.full(2000, 8)},
    ),
    "caps of no number": Case(
        "DisagreementError", r"rank {rank} has max_tokens_per_rank", balancer={"max_tokens_per_rank": {3.5}}
    ),
    "no cost": Case("ConfigurationError", r"rank {rank}: cost must be a CostModel, got 3", balancer={"cost": 3}),
    "kernel": Case("ConfigurationError", r"rank {rank}: unknown attention kernel 'x'", balancer={"kernel": "x"}),
    "planner that fails": Case(
        "RankError", r"rank {rank}: KeyError: 'no plan here'", balancer={"planner": no_plan}, on_all=CUSTOM
    ),
    "another plan": Case(
        "DisagreementError", r"rank {rank} made another plan", balancer={"planner": another_plan}, on_all=CUSTOM
    ),
    "plan for others": Case(
        "PlanError", r"rank {rank}: .* other lengths", balancer={"planner": plan_for_others}, on_all=CUSTOM
    ),
    "plan for other homes": Case(
        "PlanError", r"rank {rank}: .* other lengths", balancer={"planner": plan_for_other_homes}, on_all=CUSTOM
    ),
    "plan for more ranks": Case(
        "PlanError", r"rank {rank}: .* other lengths", balancer={"planner": plan_for_more_ranks}, on_all=CUSTOM
    ),
}


def raised(rank: int, world_size: int, case: Case) -> tuple[str, str, float]:
    """Type and text of the error on this rank, and the seconds until it came."""
    is_bad = rank == world_size - 1
    arguments = {"cost": COST, "planner": "home", "topology": f"g{world_size}n1"} | case.on_all
    if is_bad:
        arguments |= case.balancer
        knapformer.balancer.__version__ = case.version or knapformer.__version__
    if isinstance(arguments["topology"], str):
        arguments["topology"] = arguments["topology"].replace("SIZE", str(world_size))
    began = time.monotonic()
    try:
        balancer = Balancer(**arguments)
        began = time.monotonic()
        balancer.prepare(**({"lengths": GOOD} | case.good | (case.bad if is_bad else {})))
    except errors.KnapFormerError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    finally:
        knapformer.balancer.__version__ = knapformer.__version__
    return "none", "", time.monotonic() - began


def raise_all(rank: int, world_size: int) -> dict[str, Any]:
    """Every case, and after each of them a step on the same balancer that must work."""
    after = Balancer(COST, planner="ulysses")
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        found[name] = raised(rank, world_size, case)
        step = after.prepare(GOOD)
        x = torch.arange(8.0)
        assert torch.equal(step.restore(step.route(x)), x), name
    # On the very balancer that has raised, too.
    for bad in ({"error": OSError("again")}, {"lengths": [-1]}):
        with pytest.raises(errors.KnapFormerError):
            after.prepare(**({"lengths": GOOD} | (bad if rank == 0 else {})))
    assert after.prepare(GOOD).num_tokens
    found["nothing wrong"] = raised(rank, world_size, Case("none", ""))
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def found(request) -> list[dict[str, Any]]:
    return run_ranks(raise_all, request.param)


@pytest.mark.parametrize("name", CASES)
def test_raises_the_same_error_everywhere(found, name):
    case, last = CASES[name], len(found) - 1
    kinds, texts, seconds = zip(*(own[name] for own in found), strict=True)
    assert set(kinds) == {case.error}, kinds
    assert len(set(texts)) == 1, texts
    assert re.search(case.text.replace("{rank}", str(last)), texts[0]), texts[0]
    assert max(seconds) < LIMIT_S, seconds


def test_does_not_raise_without_a_fault(found):
    """The negative control."""
    assert {own["nothing wrong"][0] for own in found} == {"none"}


def wrong_rows(rank: int, world_size: int) -> str:
    step = Balancer(COST, planner="ulysses").prepare(GOOD)
    step.route(torch.zeros(9 if rank == 0 else 8, 2))
    return "routed"


def test_wrong_rows_raise_on_their_rank():
    outcomes = try_ranks(wrong_rows, 2, timeout_s=60)
    assert isinstance(outcomes[0].error, errors.LengthsError)
    assert "rank 0: expected a tensor of 8 rows, got shape (9, 2)" in outcomes[0].failure
    assert outcomes[1].value is None, "rank 1 cannot have routed without rank 0"


def die(rank: int, world_size: int, where: str) -> None:
    """The last rank is killed in attention, in the backward pass of it, or before it prepares the second step."""
    is_victim = rank == world_size - 1
    balancer = Balancer(COST, planner="ulysses")
    began = time.monotonic()
    try:
        for index in range(3):
            if where == "prepare" and is_victim and index == 1:
                balancer.plan = lambda lengths: os.kill(os.getpid(), signal.SIGKILL)
            step = balancer.prepare([64, 32])
            x = step.route(torch.randn(96, 32, requires_grad=True))
            for layer in range(3):
                q = x.view(-1, 4, 8)
                if where == "attention" and is_victim and layer == 1 and index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                if where == "backward" and is_victim and layer == 1 and index == 1:
                    q.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
                x = step.attention(q, q, q).reshape(-1, 32)
            step.restore(x).sum().backward()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - began:.3f} s: {error}") from error


@pytest.mark.parametrize("where", ["prepare", "attention", "backward"])
def test_a_killed_rank_ends_the_others(where):
    *others, victim = try_ranks(die, 3, where, timeout_s=60)
    assert victim.exitcode == -signal.SIGKILL
    for outcome in others:
        seconds = re.search(r"after ([\d.]+) s", outcome.failure)
        assert seconds, outcome
        assert float(seconds[1]) < 10


def be_late(rank: int, _world: int, folder: str, timeout_s: float) -> str:
    """The last rank prepares only when the first has given up; returns what the first one was told."""
    balancer, file = Balancer(COST, timeout=timedelta(seconds=timeout_s)), Path(folder) / "gave-up"
    if rank == 0:
        try:
            balancer.prepare(GOOD)
        except RuntimeError as error:
            file.write_text(str(error))
    else:
        deadline = time.monotonic() + 10
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    return file.read_text() if file.exists() else ""


def test_a_rank_waits_as_long_as_it_is_told(tmp_path):
    """The negative control would wait for ten minutes."""
    told, _ = run_ranks(be_late, 2, str(tmp_path), 1.0)
    assert re.search("(?i)timed out|timeout", told)
    with pytest.raises(AssertionError, match=r"ranks \[0, 1\] did not end"):
        try_ranks(be_late, 2, str(tmp_path / "nowhere"), 600.0, timeout_s=12)
