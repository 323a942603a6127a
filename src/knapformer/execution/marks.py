"""Marks: 8 bytes beside each message that cannot carry a tag, which say of what call it is.

NCCL matches the messages of two ranks by their order alone. Beside each therefore goes a mark, in the same batch; it is
compared on the device with the mark of the call that the message was received for. No host waits for that. Where they
differ, the first bytes of what arrived are set, which is NaN in every floating-point type: a loss of such numbers is
NaN, and none of them is taken for right. ``knapformer.Step.check`` and the next ``prepare`` then name the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from knapformer.execution.devices import outliving, to_device

SPOILT_BYTES = 16
"""Of a message that is of another call: at least one element of any dtype."""


class Marks:
    """What one rank's messages were marked with, and whether one of another call has arrived."""

    def __init__(self) -> None:
        self._found: Tensor | None = None
        self._asked: tuple[Tensor, torch.cuda.Event | None] | None = None

    def of(self, sent: Sequence[int], expected: Sequence[int], received: Tensor) -> Marked:
        """For one exchange.

        Args:
            sent, expected: marks of the messages to, and from, other ranks.
            received: flat uint8, where messages arrive.
        """
        with outliving():
            both = to_device(np.asarray([*sent, *expected], np.int64), received.device)
            return Marked(self, both[: len(sent)], both[len(sent) :], both.new_empty(len(expected)), received)

    def note(self, is_other: Tensor) -> None:
        """Whether a message of another call has arrived: () bool on the device."""
        if self._found is None:
            with outliving():
                self._found = torch.zeros_like(is_other)
        self._found.logical_or_(is_other)

    def known(self) -> bool:
        """Whether a message of another call had arrived when this was last asked, as far as the host can tell by now.

        It waits for no device, and so is one call late: it reads what the last call had copied, and has it copied anew.
        """
        was_found = False
        if self._asked is not None:
            copy, event = self._asked
            was_found = (event is None or event.query()) and bool(copy)
        if self._found is not None:
            self._asked = _copied(self._found)
        return was_found


@dataclass(slots=True, eq=False)
class Marked:
    """The marks of one exchange, on the device.

    Attributes:
        marks: of this rank.
        sent: (messages sent,) int64.
        expected, arrived: (messages received,) int64.
        received: flat uint8, where the messages arrive.
    """

    marks: Marks
    sent: Tensor
    expected: Tensor
    arrived: Tensor
    received: Tensor

    def wait(self) -> None:
        """Compare, once messages and marks have arrived: on CUDA, on the stream that waits for them."""
        is_other = (self.arrived != self.expected).any()
        self.received[:SPOILT_BYTES].masked_fill_(is_other, 255)
        self.marks.note(is_other)


def _copied(flag: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and when it is there; it is not waited for."""
    if flag.device.type != "cuda":
        return flag.clone(), None
    copy = torch.empty((), dtype=torch.bool, pin_memory=True)
    copy.copy_(flag, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, event
