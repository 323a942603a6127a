"""Law 9: ranks agree on every call, or all raise the same error before a number is used."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import disagreements
import pytest
import torch
from disagreement_cases import COST, HEADS, LENGTHS, heads
from disagreements import CASES
from launch import run_ranks
from torch import Tensor

from knapformer import Balancer, DisagreementError, KnapFormerError, Lengths, Plan
from knapformer.execution import watch
from knapformer.execution.calls import Call, Calls, Description, StepCalls, first_difference
from knapformer.execution.marks import Marks
from knapformer.execution.transport import Channel
from knapformer.models import local_attention

LIMIT_S = 20.0


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, float]]:
    return disagreements.run_named(grace_s=0.2)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_are_told_the_same(told, name):
    seen, seconds = told[name]
    assert re.search(CASES[name].text, seen), seen
    assert seconds < LIMIT_S


def unchecked(rank: int, _world: int) -> bool:
    """The negative control: without the comparison, another scale on one rank is a wrong number without a word."""
    step = Balancer(COST, planner="ulysses", check_calls=False).prepare(LENGTHS[rank])
    x = step.route(heads(rank))
    right = step.restore(step.attention(x, x, x))
    wrong = step.restore(step.attention(x, x, x, scale=0.5 if rank == 1 else None))
    return torch.equal(right, wrong)


def test_notices_what_the_comparison_is_for():
    assert run_ranks(unchecked, 3) == [False, False, True], "rank 2 has no rows"


def late(rank: int, _world: int, folder: str) -> list[bool]:
    """A rank that is seconds late in every kind of call is told apart from one that is elsewhere."""
    balancer, good = Balancer(COST, planner="ulysses"), []
    for where in ("prepare", "route", "attention", "backward"):

        def pause(here: str, where: str = where) -> None:
            if rank == 2 and here == where:
                time.sleep(2.2)

        pause("prepare")
        step = balancer.prepare(LENGTHS[rank])
        pause("route")
        x = step.route(heads(rank).requires_grad_())
        pause("attention")
        y = step.restore(step.attention(x, x, x))
        pause("backward")
        y.sum().backward()
        good.append(bool(torch.isfinite(y).all()))
    return good


def test_a_late_rank_is_no_disagreement(tmp_path: Path):
    assert run_ranks(late, 3, str(tmp_path)) == [[True] * 4] * 3


def ended(rank: int, _world: int) -> list[str]:
    """After a disagreement a balancer goes on saying so, and a new one works."""
    balancer, found = Balancer(COST, planner="ulysses"), []
    step = balancer.prepare(LENGTHS[rank])
    for _ in range(2):
        try:
            step.route(heads(rank)[:, : 4 if rank == 1 else 6])
        except DisagreementError as error:
            found.append(str(error))
    try:
        balancer.prepare(LENGTHS[rank])
    except DisagreementError as error:
        found.append(str(error))
    assert Balancer(COST, planner="ulysses").prepare(LENGTHS[rank]).route(heads(rank)).isfinite().all()
    return found


def test_a_balancer_ends_and_another_begins():
    found = run_ranks(ended, 3)
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 1 and len(found[0]) == 3


def fail_and_go_on(rank: int, _world: int) -> list[str]:
    """An error that every rank raises in the same call ends nothing."""
    balancer, found = Balancer(COST, planner="ulysses"), []
    for _ in range(2):
        step = balancer.prepare(LENGTHS[rank])
        x = step.route(heads(rank).requires_grad_())
        for call, tensors in ((step.attention, (x, x, x[:, :, :4])), (step.route, (heads(rank)[1:], heads(rank)))):
            try:
                call(*tensors)
            except KnapFormerError as error:
                found.append(str(error))
            if rank == 1:
                time.sleep(2.0)  # so that the others wait long enough to look for errors
        step.restore(step.attention(x, x, x)).sum().backward()
        step.check()
    return found


def test_what_all_ranks_raise_ends_nothing():
    for rank, texts in enumerate(run_ranks(fail_and_go_on, 2)):
        assert len(texts) == 4 and texts[:2] == texts[2:]
        assert texts[0].startswith(f"rank {rank}: q has heads of width 8") and "expected a tensor" in texts[1]


def apart(lengths: Lengths) -> Plan:
    """Ranks 0 and 1 share everything; rank 2 has nothing, and no part in it."""
    tokens = lengths.tokens.tolist()
    return Plan.from_placements(
        lengths=tokens,
        homes=lengths.homes.tolist(),
        segments=[[(0, 0, n // 2), (1, n // 2, n)] for n in tokens],
        tiles=[[(0, 0, 2, 0, n), (1, 2, HEADS, 0, n)] for n in tokens],
        world_size=lengths.num_ranks,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        planner="apart",
    )


def gradients_of_some(rank: int, _world: int, bad: str) -> list[bool] | str:
    """Rank 2 has no rows and no part in the step; only rank 0 knows that the rows need gradients."""
    balancer, good, weight = Balancer(COST, planner=apart), [], torch.ones((), requires_grad=True)
    try:
        for _ in range(3):
            step = balancer.prepare(LENGTHS[rank])
            assert (step.num_tokens == 0) == (rank == 2)
            x = heads(rank).requires_grad_(rank == 0)
            y = step.route(x)
            out = step.restore(step.attention(y * weight, y, y.sin()))
            if not (bad == "no backward" and rank == 1):
                out.square().sum().backward()
            if bad == "one more" and rank == 2:
                step.restore(y)
            step.check()
            reference = heads(rank).requires_grad_()
            local_attention(LENGTHS[rank])(reference, reference, reference.sin()).square().sum().backward()
            good.append(rank != 0 or torch.allclose(x.grad, reference.grad, atol=1e-5))
    except DisagreementError as error:
        return str(error)
    return good


def test_ranks_that_a_step_does_not_connect_may_lack_gradients():
    assert run_ranks(gradients_of_some, 3, "") == [[True] * 3] * 3


@pytest.mark.parametrize(("bad", "text"), [("no backward", "backward of call"), ("one more", "restore of tokens")])
def test_and_nothing_else(bad, text):
    """The negative control: a connected rank without its backward pass, and another call on the one that is not."""
    told = run_ranks(gradients_of_some, 3, bad)
    assert len(set(told)) == 1 and text in told[0], told


def marked_balancer(planner: Any = "ulysses") -> Balancer:
    """As on NCCL, whose messages carry no tags: in batches, with marks. Gloo stands in for it."""
    balancer = Balancer(COST, planner=planner)
    calls = balancer.group.calls
    assert calls is not None
    calls.marks = Marks()
    balancer.channel = Channel.over(balancer.group.data, balancer.group.rank, None, calls)
    return balancer


def routes_without_tags(rank: int, _world: int, bad: bool) -> tuple[Tensor, str, bool]:
    """Two tensors of as many bytes, which rank 1 may route in the other order; one of them has fractions."""
    balancer, found, told = marked_balancer(), {}, ""
    step = balancer.prepare(LENGTHS[rank])
    numbers = torch.arange(sum(LENGTHS[rank]))
    xs = {"float": numbers + 0.5, "int": numbers.int()}
    with torch.no_grad():
        for name in ("int", "float") if bad and rank == 1 else ("float", "int"):
            found[name] = step.route(xs[name])
    try:
        step.check()
        balancer.prepare(LENGTHS[rank])
    except DisagreementError as error:
        told = str(error)
    assert balancer.group.calls is not None and balancer.group.calls.marks is not None
    return found["float"], told, balancer.group.calls.marks.known()


def test_without_tags_a_message_of_another_call_is_no_number():
    good, bad = (run_ranks(routes_without_tags, 3, wrong) for wrong in (False, True))
    for x, told, known in good:
        assert (len(x), told, known) == (9, "", False) and torch.equal(x % 1, torch.full((9,), 0.5))
    assert len({told for _, told, _ in bad}) == 1 and "rank 1 made step 1, call 1: route of tokens: int" in bad[0][1]
    for x, _, known in bad:
        assert known and x.isnan().any(), "each rank has received a message of another call"


def backward_without_tags(rank: int, _world: int, bad: bool) -> tuple[list[bool], str]:
    """Two losses, of which rank 1 may run the second one first: of each gradient, whether it is right and is finite."""
    balancer, steps, losses, told = marked_balancer(), [], [], ""
    xs = [heads(rank).requires_grad_() for _ in range(2)]
    for x in xs:
        steps.append(balancer.prepare(LENGTHS[rank]))
        y = steps[-1].route(x)
        losses.append(steps[-1].restore(steps[-1].attention(y, y, y.sin())).square().sum())
    for i in (1, 0) if bad and rank == 1 else (0, 1):
        (losses[i] * (i + 1)).backward()
    try:
        steps[-1].check()  # before the optimizer's step
    except DisagreementError as error:
        told = str(error)
    x = heads(rank).requires_grad_()
    local_attention(LENGTHS[rank])(x, x, x.sin()).square().sum().backward()
    assert x.grad is not None
    return [torch.allclose(y.grad, x.grad * (i + 1), atol=1e-4) for i, y in enumerate(xs)], told


def test_without_tags_backward_in_another_order_is_told_before_the_optimizer_steps():
    good, bad = (run_ranks(backward_without_tags, 3, wrong) for wrong in (False, True))
    assert good == [([True, True], "")] * 3
    assert len({told for _, told in bad}) == 1 and "backward of call" in bad[0][1], bad
    assert not any(any(right) for right, _ in bad[:2])


def test_a_mark_is_read_without_waiting_and_one_call_late():
    marks = Marks()
    received = torch.zeros(64, dtype=torch.uint8)
    for arrived, knows in ((7, []), (8, [False, True, True])):
        marked = marks.of([1], [7], received)
        marked.arrived.fill_(arrived)
        marked.wait()
        assert bool(received.view(torch.float32)[:4].isnan().all()) == bool(knows)
        assert not received[16:].any()
        for known in knows:
            assert marks.known() is known
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert received.view(dtype)[: 16 // dtype.itemsize].isnan().all()


class Store(dict):
    """As ``torch.distributed``'s."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def state(waits: int | None, peers: list[int], made: list[int], name: str = "a", **other: Any) -> dict[str, Any]:
    """A rank that has made calls 1, 2, … and waits in one of them, or in none."""
    record = {"window": 0, "keys": watch._packed(made), "failures": []} | other
    waiting = {} if waits is None else {"waits": watch._packed([waits]), "text": f"call {waits}"}
    return {"name": name, "waits": None, "peers": peers, "made": {name: record}} | waiting


LATE = [
    # Rank 1 is behind, and waits for rank 2, which computes, or has written nothing yet.
    {0: state(5, [1], [4, 5]), 1: state(4, [2], [4]), 2: state(None, [], [])},
    {0: state(5, [1], [4, 5]), 1: state(4, [2], [4])},
    # Rank 1 waits for rank 0 in a call that rank 0 has made: what it waits for is under way.
    {0: state(5, [1], [4, 5]), 1: state(4, [0], [4])},
    # Rank 1 waits in the same call.
    {0: state(5, [1], [4, 5]), 1: state(5, [0, 2], [4, 5])},
    # What rank 1 wrote is of another step.
    {0: state(5, [1], [4, 5]), 1: state(6, [0], [6], window=1)},
    # Rank 1 has raised an error, and so has rank 0.
    {0: state(5, [1], [5], failures=[["LengthsError", "rank 0"]]), 1: state(None, [], [], failures=[["X", "rank 1"]])},
    # Ranks 1 and 2 are in a circle: it is theirs to find, from here it may be old.
    {0: state(5, [1], [5]), 1: state(6, [2], [6]), 2: state(7, [1], [7])},
]
BOTH = [
    {name: {"window": 0, "keys": watch._packed(made), "failures": []} for name, made in calls.items()}
    for calls in ({"a": [5], "b": []}, {"a": [], "b": [6]})
]
DIFFERENT = [
    # Each waits for the other in a call that it has not made.
    ({0: state(5, [1], [4, 5]), 1: state(6, [0], [4, 6])}, "rank 0 waits in call 5; rank 1 waits in call 6"),
    # Rank 1 has gone past.
    ({0: state(5, [1], [4, 5]), 1: state(8, [0, 2], [4, 6, 7, 8])}, "rank 1 waits in call 8"),
    # A call that rank 0 has made once more.
    ({0: state(5, [1], [5, 5]), 1: state(6, [0], [5, 6])}, "rank 1 waits in call 6"),
    # A circle of three.
    ({0: state(5, [1], [5]), 1: state(6, [2], [6]), 2: state(7, [0], [7])}, "rank 1 waits in call 6; rank 2"),
    # Rank 1 has raised an error in the call.
    ({0: state(5, [1], [5]), 1: state(None, [], [4], failures=[["LengthsError", "rank 1: no"]])}, "rank 1: no"),
    # Two balancers.
    (
        {
            0: state(5, [1], [5]) | {"made": BOTH[0]},
            1: state(6, [0], [6], "b") | {"made": BOTH[1]},
        },
        "rank 0 waits in call 5 by balancer a; rank 1 waits in call 6 by balancer b",
    ),
]


def diagnosed(states: dict[int, dict[str, Any]]) -> Any:
    own = watch.Watch(Store({watch._key(rank): json.dumps(s) for rank, s in states.items()}), timedelta(0))
    own._left = watch.MOST_READ
    return own._search(0, {0: states[0]}, [], 0)


@pytest.mark.parametrize("states", LATE)
def test_who_is_late_is_waited_for(states):
    assert diagnosed(states) is None


@pytest.mark.parametrize(("states", "text"), DIFFERENT)
def test_who_never_comes_is_named(states, text):
    found = diagnosed(states)
    assert found is not None and text in found["error"][1]


def test_a_rank_of_thousands_looks_at_its_neighbours():
    near = watch._nearest([r for r in range(1000) if r != 998], 998)
    assert sorted(near) == [*range(7), *range(990, 998), 999]


def test_transcripts():
    told = []
    for order in ("ab", "ba", "aab"):
        calls = Calls("n", 0, [0, 1])
        step = StepCalls(calls, 0, lambda: ([], []))
        for what in order:
            step.make(Description(what))
        told.append((calls.transcript.digests, calls.transcript.told()))
    digests, texts = [digest for digest, _ in told], [words for _, (_, words) in told]
    assert len(set(digests)) == 3
    assert first_difference(texts[:2], [0, 1]) == "rank 0 made step 0, call 1: a; rank 1 made step 0, call 1: b"
    assert first_difference([texts[0], texts[0][:1]], [0, 3]).endswith("rank 3 made no further call")
    assert first_difference([texts[0], texts[0]], [0, 1]) == ""
    calls.compared()
    assert calls.transcript.digests == (0, 0) and not calls.transcript.calls


def test_tags():
    """Messages of calls that differ in anything differ in their tags, which gloo wants below 2³¹."""
    what, other = Description("a"), Description("b")
    calls = [
        Call.of(step, part, place, said, has_grad=grad, is_backward=back)
        for step in range(4)
        for part in range(3)
        for place in range(60)
        for said in (what, other)
        for grad, back in ((False, False), (True, False), (True, True))
    ]
    tags = {call.tag(size) for call in calls for size in (64, 128)}
    assert len(tags) >= 2 * len(calls) - 1 and 0 <= min(tags) <= max(tags) < 2**31
    assert Call.of(1, 0, 2, what) == Call.of(1, 0, 2, what)
