"""Which call this is: every exchange, forward and backward, and every ``prepare`` of a balancer has an identity.

It is made of the step, the place in the step, the direction, and a description of everything that ranks must have in
common. Ranks make the same calls in the same order (law 5). Three things use the identity:

- It is the tag of a gloo message, so that messages of two calls are never taken for one another; a rank that then waits
  finds out why (``knapformer.execution.watch``). On NCCL it stands in a mark beside the message
  (``knapformer.execution.marks``).
- Each rank keeps a transcript of its calls since the last ``prepare``; digests of it are compared in the next one.
- Every error names the calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from knapformer.errors import KnapFormerError, RankError
from knapformer.execution.marks import Marks
from knapformer.execution.telling import carried, waited_in_vain
from knapformer.schedules.meetings import Links

MOST_REMEMBERED = 20_000
"""Calls since the last ``prepare``; a program that never calls it again must not fill the memory."""

MOST_DESCRIBED = 1000
"""Descriptions of calls that are kept from step to step."""

WORD = (1 << 63) - 1
FACTOR, STEP, PART, PLACE, FLAGS, BYTES = (
    0x27D4EB2F165667C5,
    0x165667B19E3779F9,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
    0x3C6EF372FE94F82B,
    0x510E527FADE682D1,
)
"""Odd numbers without a pattern, by which the parts of an identity are told apart."""


class Description:
    """What a call is, in words that all ranks have in common.

    Attributes:
        text: the words.
        code: 63 bits of them, the same on every machine.
    """

    __slots__ = ("code", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.code = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") & WORD


PREPARE, CHECK, VOTE, FAILED = (
    Description(text) for text in ("prepare", "check", "which inputs need gradients", "an error of this rank")
)


class Call(NamedTuple):
    """One call of one rank.

    Attributes:
        step, part: of which step, and micro-step.
        place: how many calls the step had before.
        what: its description.
        has_grad: a backward pass follows.
        is_backward: this is it.
        key: 63 bits of all that.
    """

    step: int
    part: int
    place: int
    what: Description
    has_grad: bool
    is_backward: bool
    key: int

    @classmethod
    def of(
        cls, step: int, part: int, place: int, what: Description, *, has_grad: bool = False, is_backward: bool = False
    ) -> Call:
        key = what.code + step * STEP + part * PART + place * PLACE + (has_grad + 2 * is_backward) * FLAGS
        return cls(step, part, place, what, has_grad, is_backward, (key ^ key >> 31) * FACTOR & WORD)

    def tag(self, num_bytes: int) -> int:
        """31 bits for a message of the call; messages that differ in anything have other tags, but for one in 2³¹."""
        return ((self.key + num_bytes * BYTES) * FACTOR & WORD) >> 32

    @property
    def text(self) -> str:
        """In words."""
        return self.name + (", with gradients" if self.has_grad and not self.is_backward else "")

    @property
    def name(self) -> str:
        """In words, whether or not it needs gradients."""
        step = f"{self.step}" if not self.part else f"{self.step}, micro-step {self.part}"
        if not self.place:
            return f"{self.what.text} of step {step}"
        return f"step {step}, {'backward of ' * self.is_backward}call {self.place}: {self.what.text}"


class Waiting(NamedTuple):
    """A call that this rank waits in, and for whom (ranks of the balancing group)."""

    call: Call
    peers: Sequence[int]


@dataclass(eq=False)
class Transcript:
    """Calls of one rank since the last ``prepare``.

    Attributes:
        window: how many transcripts the balancer had before this one.
        calls: the last ones of them, and whether each was made outside of backward passes.
        forward: digest of the calls outside of backward passes, gradients left out: the same on all ranks.
        backward: of which steps something ran backward; the same on all ranks.
        everything: digest of all calls in their order: the same on ranks that a step connects.
        links: by step and micro-step, which ranks those that were used connect.
        failures: errors that this rank raised in calls that others make, too.
        unfinished: exchanges that were begun, and whose messages this rank has not waited for yet.
    """

    window: int
    calls: list[tuple[Call, bool]] = field(default_factory=list)
    forward: int = 0
    backward: int = 0
    everything: int = 0
    links: dict[tuple[int, int], Callable[[], Links]] = field(default_factory=dict)
    failures: list[KnapFormerError] = field(default_factory=list)
    unfinished: list[Call] = field(default_factory=list)
    _ran_backward: set[tuple[int, int]] = field(default_factory=set)

    def note(self, call: Call) -> None:
        """Add a call."""
        is_forward = not is_backward_running()
        self.calls.append((call, is_forward))
        if len(self.calls) > MOST_REMEMBERED:
            del self.calls[: MOST_REMEMBERED // 2]
        self.everything = (self.everything + call.key) * FACTOR & WORD
        if is_forward:
            own = call.what.code + call.step * STEP + call.part * PART
            self.forward = (self.forward + own) * FACTOR & WORD
        elif (call.step, call.part) not in self._ran_backward:
            self._ran_backward.add((call.step, call.part))
            self.backward = (self.backward + call.step * STEP + call.part * PART + FLAGS) & WORD

    @property
    def digests(self) -> tuple[int, int]:
        """What all ranks have in common, and what those have that a step connects."""
        return (self.forward ^ self.backward) & WORD, self.everything

    def finish(self, call: Call) -> None:
        """The messages of an exchange are through."""
        if self.unfinished:
            self.unfinished = [other for other in self.unfinished if other is not call]

    def withdraw(self) -> None:
        """This rank goes no further: what it has begun and not finished counts as not made."""
        for unfinished in self.unfinished:
            at = max((i for i, (call, _) in enumerate(self.calls) if call is unfinished), default=None)
            if at is not None:
                del self.calls[at]
        self.unfinished.clear()

    def told(self) -> tuple[list[str], list[str]]:
        """What ``digests`` are of, in words."""
        return [call.name for call, is_forward in self.calls if is_forward], [call.text for call, _ in self.calls]


class Calls:
    """The calls of one balancer on one rank.

    Attributes:
        name: of the balancer, the same on all ranks.
        rank: in the balancing group.
        world_ranks: of the ranks of the balancing group, those in the default group.
        num_steps: how often ``prepare`` was called.
        gathering: the last call in which all ranks gathered something.
        transcript: since the last one.
        waiting: what the rank waits in, None while it computes; read by the watch's thread.
        verdict: the error that has ended this balancer on all ranks.
        watch: finds out why this rank waits.
        marks: of messages that cannot carry tags, where there are such.
        groups: gloo groups of this balancer, whose waits a disagreement ends.
    """

    alive: ClassVar[weakref.WeakSet[Calls]] = weakref.WeakSet()
    """Of all balancers of the process: a rank that waits in one of them tells the others how far each of them is."""

    def __init__(
        self,
        name: str,
        rank: int,
        world_ranks: Sequence[int],
        watch: Any = None,
        groups: Sequence[Any] = (),
        marks: Marks | None = None,
    ) -> None:
        self.name, self.rank, self.world_ranks, self.groups = name, rank, tuple(world_ranks), tuple(groups)
        self.num_steps, self.transcript = 0, Transcript(0)
        self.gathering = Call.of(0, 0, 0, PREPARE)
        self._described: dict[Any, Description] = {}
        self.waiting: Waiting | None = None
        self.verdict: KnapFormerError | None = None
        self.watch, self.marks = watch, marks
        Calls.alive.add(self)

    def made(self, call: Call) -> Call:
        """Note a call. Every rank makes it.

        Raises:
            KnapFormerError: an earlier call has ended this balancer.
        """
        if self.verdict is not None:
            raise self.verdict
        self.transcript.note(call)
        return call

    def outside(self, what: Description) -> Call:
        """Note a call of the whole group that belongs to no step yet, and gathers."""
        self.gathering = self.made(Call.of(self.num_steps, 0, 0, what))
        return self.gathering

    def described(self, what: str, tensors: Sequence[Tensor]) -> Description:
        """An exchange: ``what`` it is for, and what its tensors (units, width) have in common."""
        x = tensors[0]
        key = (what, len(tensors), x.dtype, x.shape[1])
        found = self._described.get(key)
        if found is None:
            several = f"{len(tensors)} tensors of " if len(tensors) > 1 else ""
            found = self._remember(key, f"{what}, {several}{short(x.dtype)}, width {x.shape[1]}")
        return found

    def worded(self, text: str) -> Description:
        """A call in words."""
        return self._described.get(text) or self._remember(text, text)

    def _remember(self, key: Any, text: str) -> Description:
        """For the steps to come, which make the same calls."""
        if len(self._described) >= MOST_DESCRIBED:
            self._described.clear()
        self._described[key] = found = Description(text)
        return found

    def compared(self) -> None:
        """The calls up to now were the same on all ranks, or the ranks know of it: a new transcript begins."""
        self.transcript = Transcript(self.transcript.window + 1)

    def wait(self, works: Sequence[Any], waiting: Waiting) -> None:
        """Wait for messages of a call.

        Raises:
            KnapFormerError: on every rank that waits, where one made another call, failed, ended, or did not come in
                time.
        """
        began, self.waiting = time.monotonic(), waiting
        try:
            for work in works:
                work.wait()
            self.transcript.finish(waiting.call)
        except RuntimeError as error:
            self.explain(error, waiting, began)
        finally:
            self.waiting = None

    def explain(self, error: RuntimeError, waiting: Waiting, began: float | None = None) -> NoReturn:
        """Raise what lies behind an error of the transport, which is its cause.

        Args:
            waiting: in what, and for whom; since ``began``, a time of ``time.monotonic``.
        """
        why = error if self.verdict is None else None  # else the watch ended the wait, before its time
        waited = f"rank {self.rank} {waited_in_vain(waiting.call.text, waiting.peers, began, why)}"
        if self.verdict is None and self.watch is not None:
            self.verdict = self.watch.verdict_of(self, waiting, waited)
        if self.verdict is None:
            self.verdict = RankError(waited)
        found = self.verdict
        if type(found) is RankError and waited not in str(found):
            found = RankError(f"{found} ({waited})")
        raise found from error

    def ended_by(self, error: BaseException) -> None:
        """An exception ends the step on this rank: tell those that wait for it; see ``knapformer.Balancer.guard``."""
        if self.verdict is None:
            told = carried(error)
            self.transcript.withdraw()
            with contextlib.suppress(RuntimeError):  # the store went away with the rank that kept it
                self.failed(Call.of(self.num_steps, 0, 0, FAILED), told)

    def settle(self, call: Call, members: Sequence[int], error: KnapFormerError | None) -> KnapFormerError:
        """The one error of a call that ranks could not agree on; every rank of ``members`` calls it, and raises it."""
        found: KnapFormerError = self.watch.settle_call(self, call, members, error)
        return found

    def failed(self, call: Call, error: KnapFormerError) -> None:
        """This rank raises ``error`` in a call that others make, too: tell those that wait for it.

        Where all of them raise one, all of them may go on.
        """
        self.transcript.failures.append(error)
        self.made(call)
        if self.watch is not None:
            self.watch.publish(self, None)


class StepCalls:
    """The calls of one step on one rank.

    Args:
        calls: of its balancer.
        part: of a micro-step, from 1 on; 0 for a step that has none.
        links: which ranks the step connects.
    """

    def __init__(self, calls: Calls, part: int, links: Callable[[], Links]) -> None:
        self.calls, self.step, self.part, self.links = calls, calls.num_steps, part, links
        self._place = 0

    def begin(self) -> None:
        """The step that begins now is the one that these calls are of; it was made beside earlier ones."""
        self.step = self.calls.num_steps

    def make(self, what: Description, *, has_grad: bool = False) -> Call:
        """Note the step's next call; every rank makes it."""
        self._place += 1
        return self._note(Call.of(self.step, self.part, self._place, what, has_grad=has_grad))

    def backward(self, call: Call) -> Call:
        """Note the backward pass of a call."""
        what = call.what
        return self._note(Call.of(self.step, self.part, call.place, what, has_grad=True, is_backward=True))

    def failed(self, error: KnapFormerError) -> None:
        """Instead of the step's next call this rank raises ``error``; the others are told."""
        self._place += 1
        self.calls.transcript.links[self.step, self.part] = self.links
        self.calls.failed(Call.of(self.step, self.part, self._place, FAILED), error)

    def _note(self, call: Call) -> Call:
        self.calls.transcript.links[self.step, self.part] = self.links
        return self.calls.made(call)


def is_backward_running() -> bool:
    """Whether autograd runs backward in this thread, recomputation included."""
    return torch._C._current_graph_task_id() != -1


def short(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def first_difference(transcripts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """Which call ranks made differently, or only some of them made; empty where there is none.

    Args:
        transcripts: the calls of each rank in words.
        ranks: their numbers.
    """
    for rank, own in zip(ranks[1:], transcripts[1:], strict=True):
        first = transcripts[0]
        for at in range(max(len(first), len(own))):
            a, b = (calls[at] if at < len(calls) else None for calls in (first, own))
            if a != b:
                return f"rank {ranks[0]} {_made(a)}; rank {rank} {_made(b)}"
    return ""


def _made(text: str | None) -> str:
    return "made no further call" if text is None else f"made {text}"
