"""Why a rank waits: a thread that looks at those it waits for, once it has waited for a second.

It costs nothing while ranks agree. A rank that has waited ``GRACE_S`` writes into the store of the default group which
call it waits in, for whom, and which calls it has made; it reads what its peers have written. Ranks disagree where a
peer has raised an error instead of the call, and where ranks wait for one another in a circle, each in a call that the
next one has not made. A rank that is merely late, because it still computes or waits for such a rank, is in no circle.

What is read may be old, and does no harm. Only circles through this rank count, and what this rank itself has made is
known as of now: the rank before it in the circle waits for a call that this one has still not made, so it waits still
and what it wrote is still true; so does the rank before that one, and so on.

The first rank to find a disagreement writes it down for all. Each then ends its own wait by letting a receive of its
own time out, after which gloo ends all others of the group.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from knapformer.errors import DisagreementError, KnapFormerError, RankError
from knapformer.execution.calls import Call, Calls, Waiting, first_difference
from knapformer.execution.telling import as_error, naming
from knapformer.execution.transport import end_waits

GRACE_S, TICK_S, SLOWER, SLOWEST_S, EXPLAIN_S = 1.0, 0.25, 1.5, 10.0, 3.0
"""How long a rank waits before it looks; how often the thread wakes; each next look comes so much later, up to that
many seconds; how long a rank whose connection was closed looks for the reason."""

MOST_PEERS, MOST_READ = 16, 64
"""Ranks that one rank waits for and that are looked at, and all that are read in one look: in a group of thousands the
neighbours by rank are enough, because where two ranks are in different calls two neighbours are."""

State = Mapping[str, Any]


class Watch:
    """The thread of one balancer, and what ranks tell one another through the store.

    Args:
        store: of the default group.
        timeout: after which a rank no longer waits for what others say.
    """

    def __init__(self, store: Any, timeout: timedelta) -> None:
        self.store, self.timeout = store, timeout
        self._ended = threading.Event()
        self._published: Waiting | None = None

    def begin(self, calls: Calls) -> None:
        """Watch until ``calls`` is gone, or the process ends."""
        thread = threading.Thread(target=_run, args=(self, weakref.ref(calls), self._ended), daemon=True)
        thread.start()
        weakref.finalize(calls, _end, self._ended, thread)

    def look(self, calls: Calls, waiting: Waiting) -> None:
        """Say where this rank is, look where its peers are, and end the wait where they never come."""
        if self._published is not waiting:
            self.publish(calls, waiting)
            self._published = waiting
        verdict = self._read(_verdict_key(calls.name)) or self._diagnose(calls, waiting)
        if verdict is not None and calls.waiting is waiting:
            self._settle(calls, verdict)
            for group in calls.groups:
                end_waits(group)

    def publish(self, calls: Calls, waiting: Waiting | None) -> None:
        """Write down what this rank has called, and which call it waits in, if any."""
        self.store.set(_key(calls.world_ranks[calls.rank]), json.dumps(state_of(calls, waiting)))

    def verdict_of(self, calls: Calls, waiting: Waiting, waited: str) -> KnapFormerError | None:
        """Why a wait has failed: what some rank has found out, or finds out in the next seconds.

        Args:
            waited: in what, for whom and how long, in words; the verdict where nobody finds out more.

        Returns:
            None where the store went away with the rank that kept it.
        """
        deadline = time.monotonic() + EXPLAIN_S
        with contextlib.suppress(RuntimeError):
            self.store.set(_answer_key(calls.name, calls.rank), "")
            while True:
                found = self._read(_verdict_key(calls.name)) or self._diagnose(calls, waiting)
                if found is None and time.monotonic() > deadline:
                    silent = [r for r in waiting.peers if not self.store.check([_answer_key(calls.name, r)])]
                    ended = f"; no answer from {silent[:MOST_PEERS]}: ended, stopped or not there yet" if silent else ""
                    found = {"error": [RankError.__name__, waited + ended], "names": []}
                if found is not None:
                    self._settle(calls, found)
                    return calls.verdict
                time.sleep(TICK_S)
        return None

    def settle_call(
        self, calls: Calls, call: Call, members: Sequence[int], error: KnapFormerError | None
    ) -> KnapFormerError:
        """Every rank of ``members`` says what it did, and reads what the others did. Where all raise, all may go on."""
        window = calls.transcript.window
        keys = [f"knapformer/call/{calls.name}/{window}/{call.step}.{call.part}.{call.place}/{r}" for r in members]
        own = {"text": call.text, "error": None if error is None else [type(error).__name__, naming(calls.rank, error)]}
        self.store.set(keys[members.index(calls.rank)], json.dumps(own))
        self._wait_for(keys, calls, call, members)
        said = [json.loads(self.store.get(key)) for key in keys]
        errors = [words["error"] for words in said if words["error"] is not None]
        if error is not None and len(errors) == len(said):
            return error
        wrong = errors[0] if errors else [DisagreementError.__name__, _told_apart(said, members)]
        self._settle(calls, {"error": wrong, "names": []})
        assert calls.verdict is not None
        return calls.verdict

    def _wait_for(self, keys: Sequence[str], calls: Calls, call: Call, members: Sequence[int]) -> None:
        """Until all ranks have written what they say."""
        began = time.monotonic()
        try:
            self.store.wait(list(keys), self.timeout)
        except RuntimeError as error:
            calls.explain(error, Waiting(call, [rank for rank in members if rank != calls.rank]), began)

    def _settle(self, calls: Calls, verdict: State) -> None:
        """The first verdict stands for all ranks of the balancer, and of the others that it is about."""
        for name in sorted({calls.name, *verdict["names"]}):
            self.store.compare_set(_verdict_key(name), "", json.dumps(verdict))
            verdict = self._read(_verdict_key(name)) or verdict
        calls.verdict = as_error(*verdict["error"])

    def _diagnose(self, calls: Calls, waiting: Waiting) -> State | None:
        """The error of all ranks, and the balancers that it ends; None where this rank has to wait on."""
        me = calls.world_ranks[calls.rank]
        states: dict[int, State | None] = {me: state_of(calls, waiting)}
        self._left = MOST_READ
        return self._search(me, states, [], me)

    def _search(self, rank: int, states: dict[int, State | None], path: list[int], start: int) -> State | None:
        """Follow the ranks that wait for a call which the next one has not made; a circle never ends.

        Args:
            rank: where the search is.
            states: of ranks that were looked at.
            path: ranks from ``start`` to here.
            start: this rank.
        """
        state, path = states[rank], [*path, rank]
        assert state is not None
        for peer in _nearest(state["peers"], rank):
            if peer == start and rank != start:
                if _is_behind(states[peer], state):
                    return _circle(path, states)
            elif peer not in states and self._left > 0:
                self._left -= 1
                states[peer] = found = self._read(_key(peer))
                if _is_behind(found, state):
                    verdict = _failure(found, states[start]) or self._search(peer, states, path, start)
                    if verdict is not None:
                        return verdict
        return None

    def _read(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def _run(watch: Watch, of: weakref.ref[Calls], ended: threading.Event) -> None:
    last, pause, due = None, TICK_S, 0.0
    while not ended.wait(TICK_S):
        calls = of()
        if calls is None:
            return
        waiting, now = calls.waiting, time.monotonic()
        if waiting is not last:
            last, pause, due = waiting, TICK_S, now + GRACE_S
        elif waiting is not None and now >= due:
            try:
                watch.look(calls, waiting)
            except RuntimeError:  # the store went away with the rank that kept it
                return
            pause = min(pause * SLOWER, SLOWEST_S)
            due = time.monotonic() + pause
        del calls  # this thread must not keep it alive while it sleeps


def _end(ended: threading.Event, thread: threading.Thread) -> None:
    """Before the interpreter goes, the thread must have left the store."""
    ended.set()
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)


def state_of(calls: Calls, waiting: Waiting | None) -> State:
    """What a rank tells the others: how often it has made each call, and which one it waits in."""
    made = {}
    for c in list(Calls.alive):
        if c.verdict is None:
            transcript = c.transcript
            made[c.name] = {
                "window": transcript.window,
                "keys": _packed(call.key for call, _ in list(transcript.calls)),
                "failures": [[type(e).__name__, naming(c.rank, e)] for e in list(transcript.failures)],
            }
    state: dict[str, Any] = {"name": calls.name, "made": made, "waits": None, "peers": []}
    if waiting is not None:
        state["waits"] = _packed([waiting.call.key])
        state["text"] = waiting.call.text
        state["peers"] = [calls.world_ranks[peer] for peer in waiting.peers]
    return state


KEY_DIGITS = 8


def _packed(keys: Any) -> str:
    """32 bits of each key, as hexadecimal digits."""
    return "".join(f"{key & 0xFFFFFFFF:0{KEY_DIGITS}x}" for key in keys)


def _count(keys: str, key: str) -> int:
    return [keys[at : at + KEY_DIGITS] for at in range(0, len(keys), KEY_DIGITS)].count(key)


def _is_behind(peer: State | None, state: State) -> bool:
    """Whether the peer has not made the call that ``state``'s rank waits in, as often as that rank has."""
    name = state["name"]
    if peer is None or state["waits"] is None or name not in peer["made"] or name not in state["made"]:
        return False
    own, other = state["made"][name], peer["made"][name]
    if own["window"] != other["window"]:
        return False
    return _count(other["keys"], state["waits"]) < _count(own["keys"], state["waits"])


def _failure(peer: State | None, own: State | None) -> State | None:
    """The error that a peer has raised in a call that this rank made without one."""
    assert peer is not None and own is not None
    name = own["name"]
    theirs, ours = (state["made"][name]["failures"] if name in state["made"] else [] for state in (peer, own))
    return {"error": theirs[len(ours)], "names": []} if len(theirs) > len(ours) else None


def _circle(path: Sequence[int], states: Mapping[int, State | None]) -> State:
    members = [(rank, state) for rank in sorted(path) if (state := states[rank]) is not None]
    names = sorted({state["name"] for _, state in members})
    calls = [
        f"rank {rank} waits in {state['text']}" + (f" by balancer {state['name']}" if len(names) > 1 else "")
        for rank, state in members
    ]
    text = f"ranks make different calls, and wait for one another: {'; '.join(calls)}"
    return {"error": [DisagreementError.__name__, text], "names": names}


def _told_apart(said: Sequence[State], members: Sequence[int]) -> str:
    rank, words = next((r, w) for r, w in zip(members, said, strict=True) if w["text"] != said[0]["text"])
    return first_difference([[said[0]["text"]], [words["text"]]], [members[0], rank])


def _nearest(peers: Sequence[int], rank: int) -> Sequence[int]:
    """All peers, or those next to ``rank`` on both sides where they are many."""
    if len(peers) <= MOST_PEERS:
        return peers
    at = next((i for i, peer in enumerate(peers) if peer > rank), 0)
    half = MOST_PEERS // 2
    return [peers[(at + i) % len(peers)] for i in range(-half, half)]


def _key(world_rank: int) -> str:
    return f"knapformer/waits/{world_rank}"


def _answer_key(name: str, rank: int) -> str:
    return f"knapformer/answer/{name}/{rank}"


def _verdict_key(name: str) -> str:
    return f"knapformer/verdict/{name}"
