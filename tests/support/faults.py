"""What can happen to one of three ranks, and what the others are then told (law 10)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from launch import run_ranks, try_ranks
from torch import Tensor

from knapformer import Balancer, CostModel
from knapformer.errors import KnapFormerError

HEADS, WIDTH, RANKS, ODD = 4, 8, 3, 1
COST = CostModel(hidden=HEADS * WIDTH, num_heads=HEADS)
LENGTHS = ([64, 32], [48], [])
TIMEOUT_S = 3.0
PLACES = ("before prepare", "between prepare and route", "in attention", "midway through an exchange", "in backward")
At = Callable[[str], None]


def a_step(balancer: Balancer, rank: int, at: At, *, lengths: Any = None) -> Tensor:
    """One step of a loop; ``at`` is called in each of ``PLACES``."""
    at("before prepare")
    step = balancer.prepare(LENGTHS[rank] if lengths is None else lengths)
    at("between prepare and route")
    x = step.route(torch.ones(sum(LENGTHS[rank]), HEADS, WIDTH, requires_grad=True))
    for layer in range(3):
        if layer == 1:
            at("in attention")
            x.register_hook(lambda gradient: at("in backward"))
        with midway(at) if layer == 2 else contextlib.nullcontext():
            x = step.attention(x, x, x)
    loss: Tensor = step.restore(x).sum()
    loss.backward()
    return loss


@contextlib.contextmanager
def midway(at: At) -> Iterator[None]:
    """``at`` is called when the first message of this rank's next exchange is on its way, and the others are not."""
    send, sent = dist.isend, []

    def isend(*args: Any, **arguments: Any) -> Any:
        if len(sent) == 1:
            at("midway through an exchange")
        sent.append(None)
        return send(*args, **arguments)

    with mock.patch.object(dist, "isend", isend):
        yield
    assert len(sent) != 1, "no second message: nothing happens midway"


def told(function: Callable[[], Any]) -> tuple[str, str, float]:
    """Type, text and seconds of the error that a function ends with."""
    began, kind, text = time.monotonic(), "", ""
    try:
        function()
    except KnapFormerError as error:
        kind, text = type(error).__name__, str(error)
    except BaseException as error:
        kind, text = f"not ours: {type(error).__name__}", str(error)
    return kind, text, time.monotonic() - began


def nothing(place: str) -> None:
    pass


def at_place(place: str, do: Callable[[], Any]) -> At:
    def at(here: str) -> None:
        if here == place:
            do()

    return at


def two_steps(balancer: Balancer, rank: int, at: At) -> None:
    a_step(balancer, rank, nothing)
    a_step(balancer, rank, at)


# --- the rank is gone ---------------------------------------------------------------------------------------------


def be_killed(rank: int, _world: int, place: str, folder: str) -> tuple[str, str, float]:
    """The odd rank is killed in the second step; the others write down what they are told, and wait for one another."""
    balancer = Balancer(COST, planner="ulysses", timeout=timedelta(seconds=20))
    at = at_place(place, lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == ODD else nothing
    found = told(lambda: two_steps(balancer, rank, at))
    (Path(folder) / f"{rank}.done").touch()
    while len(list(Path(folder).glob("*.done"))) < RANKS - 1:
        time.sleep(0.05)
    raise ToldError(found)


class ToldError(Exception):
    """What a surviving rank was told: it does not wait in the launcher's barrier."""


def killed(place: str, folder: str) -> list[tuple[str, str, float]]:
    """What the surviving ranks are told."""
    outcomes = try_ranks(be_killed, RANKS, place, folder, timeout_s=90)
    assert outcomes[ODD].exitcode == -signal.SIGKILL
    return [outcomes[rank].error.args[0] for rank in range(RANKS) if rank != ODD]  # type: ignore[union-attr]


# --- the rank stands still, and goes on later ---------------------------------------------------------------------


def be_stopped(rank: int, _world: int) -> dict[str, tuple[str, str, float]]:
    """In each place, one after another: of each, what this rank is told."""
    pids: list[Any] = [None] * RANKS
    dist.all_gather_object(pids, os.getpid())
    survivors = dist.new_group([r for r in range(RANKS) if r != ODD])
    found = {}
    for place in PLACES:
        balancer = Balancer(COST, planner="ulysses", timeout=timedelta(seconds=TIMEOUT_S))
        at = at_place(place, lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == ODD else nothing
        a_step(balancer, rank, nothing)
        dist.barrier()
        found[place] = told(lambda balancer=balancer, at=at: a_step(balancer, rank, at))  # type: ignore[misc]
        if rank != ODD:
            dist.barrier(survivors)
        if rank == 0:
            os.kill(pids[ODD], signal.SIGCONT)
        dist.barrier()
    return found


def stopped() -> list[dict[str, tuple[str, str, float]]]:
    """Of each rank, what it is told in each place."""
    return run_ranks(be_stopped, RANKS, timeout_s=240)


# --- the rank goes on, and something is wrong on it ---------------------------------------------------------------


def boom() -> None:
    raise ValueError("boom")


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born without it
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5.0)


def guarded(balancer: Balancer, rank: int, at: At) -> None:
    with balancer.guard():
        a_step(balancer, rank, at)


def in_the_model(balancer: Balancer, rank: int, is_odd: bool) -> None:
    guarded(balancer, rank, at_place("in attention", boom) if is_odd else nothing)


def in_backward(balancer: Balancer, rank: int, is_odd: bool) -> None:
    guarded(balancer, rank, at_place("in backward", boom) if is_odd else nothing)


def interrupted(place: str) -> Callable[[Balancer, int, bool], None]:
    return lambda balancer, rank, is_odd: guarded(balancer, rank, at_place(place, interrupt) if is_odd else nothing)


def loader(balancer: Balancer, rank: int, is_odd: bool) -> None:
    guarded(balancer, rank, at_place("before prepare", boom) if is_odd else nothing)


def loader_with_error(balancer: Balancer, rank: int, is_odd: bool) -> None:
    balancer.prepare(LENGTHS[rank], error=ValueError("boom") if is_odd else None)


def planner(balancer: Balancer, rank: int, is_odd: bool) -> None:
    if is_odd:
        balancer.plan = lambda lengths: boom()  # type: ignore[method-assign,assignment,return-value]
    a_step(balancer, rank, nothing)


def planner_exits(balancer: Balancer, rank: int, is_odd: bool) -> None:
    if is_odd:
        balancer.plan = lambda lengths: os.sys.exit(3)  # type: ignore[method-assign,attr-defined]
    a_step(balancer, rank, nothing)


def skipped_step(balancer: Balancer, rank: int, is_odd: bool) -> None:
    """The odd rank's loop is a step shorter; then it does something else that takes long."""
    a_step(balancer, rank, nothing)
    if is_odd:
        time.sleep(TIMEOUT_S + 1.0)
    else:
        a_step(balancer, rank, nothing)


def one_forward_more(balancer: Balancer, rank: int, is_odd: bool) -> None:
    """A logging rank."""
    if is_odd:
        with torch.no_grad():
            balancer.prepare(LENGTHS[rank]).route(torch.ones(sum(LENGTHS[rank]), HEADS, WIDTH))
    a_step(balancer, rank, nothing)


def no_backward(balancer: Balancer, rank: int, is_odd: bool) -> None:
    step = balancer.prepare(LENGTHS[rank])
    x = step.route(torch.ones(sum(LENGTHS[rank]), HEADS, WIDTH, requires_grad=True))
    loss = step.restore(step.attention(x, x, x)).sum()
    if not is_odd:
        loss.backward()
    a_step(balancer, rank, nothing)


def loss_of_something_else(balancer: Balancer, rank: int, is_odd: bool) -> None:
    step = balancer.prepare(LENGTHS[rank])
    x = step.route(torch.ones(sum(LENGTHS[rank]), HEADS, WIDTH, requires_grad=True))
    y = step.restore(step.attention(x, x, x))
    loss = torch.ones((), requires_grad=True) * 2 if is_odd else y.sum()
    loss.backward()
    step.check()


INTERRUPTED = ("prepare of step 2", "call 1: route", "attention", "attention", r"backward of call \d+")
"""What the others wait in while the odd rank is interrupted, of ``PLACES``."""

CASES: dict[str, tuple[Callable[[Balancer, int, bool], None], str]] = {
    "an exception in the model": (in_the_model, "RankError: rank 1: ValueError: boom .*waited .* attention"),
    "an exception in backward": (in_backward, r"RankError: rank 1: ValueError: boom .*waited .*backward of call \d+"),
    **{
        f"Ctrl-C {place}": (interrupted(place), rf"RankError: rank 1: KeyboardInterrupt.*waited .*{where}")
        for place, where in zip(PLACES, INTERRUPTED, strict=True)
    },
    "a loader that raises": (loader, "RankError: rank 1: ValueError: boom .*waited .* prepare of step 2 for ranks"),
    "a loader that raises, told with error=": (loader_with_error, "RankError: rank 1: ValueError: boom$"),
    "a planner that raises": (planner, "RankError: rank 1: ValueError: boom$"),
    "a planner that exits": (planner_exits, "RankError: rank 1: SystemExit: 3$"),
    "a step less": (skipped_step, "RankError: .*waited .*prepare of step 3 .*the timeout is over; no answer from .*1"),
    "a forward pass more": (one_forward_more, "DisagreementError: rank 1 has gradients_enabled False"),
    "no backward pass": (no_backward, "DisagreementError: .*rank 1 waits in prepare of step 3"),
    "a loss of something else": (loss_of_something_else, "DisagreementError: .*rank 1 waits in check"),
}
"""What is wrong on the odd rank, and what the others are told."""


def be_wrong(rank: int, _world: int) -> dict[str, tuple[str, str, float]]:
    """Each case, one after another, each with a balancer of its own."""
    found = {}
    for name, (run, _) in CASES.items():
        balancer = Balancer(COST, planner="ulysses", timeout=timedelta(seconds=TIMEOUT_S))
        a_step(balancer, rank, nothing)
        dist.barrier()
        found[name] = told(lambda run=run, balancer=balancer: run(balancer, rank, rank == ODD))  # type: ignore[misc]
        dist.barrier()
    return found


def wrong() -> list[dict[str, tuple[str, str, float]]]:
    """Of each rank, what it is told in each case."""
    return run_ranks(be_wrong, RANKS, timeout_s=240)


def matches(found: tuple[str, str, float], pattern: str) -> bool:
    """Whether type and text are those expected."""
    kind, text, _ = found
    return re.search(pattern, f"{kind}: {text}") is not None


def run_all(folder: str) -> list[tuple[str, str, float]]:
    """Every fault on 3 gloo ranks: (what happens, what the others see, seconds until they do), for docs/trust.md."""
    rows = []
    for place in PLACES:
        (Path(folder) / place).mkdir()
        rows.append((f"a rank is killed {place}", killed(place, f"{folder}/{place}")[0]))
    first = stopped()[0]
    rows += [(f"a rank is stopped {place}, timeout {TIMEOUT_S:g} s", first[place]) for place in PLACES]
    rows += [(f"on one rank: {name}", seen) for name, seen in wrong()[0].items()]
    return [(what, f"{kind}: {text}", seconds) for what, (kind, text, seconds) in rows]
