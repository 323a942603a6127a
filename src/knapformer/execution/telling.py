"""Errors that go from rank to rank, in words: what happened on one, and what the others waited for."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from knapformer.errors import (
    CapacityError,
    ConfigurationError,
    DisagreementError,
    KnapFormerError,
    LengthsError,
    PlanError,
    RankError,
)

ERRORS = (RankError, LengthsError, ConfigurationError, CapacityError, PlanError, DisagreementError)

MOST_NAMED = 8
"""Ranks, or elements of a list, in one error."""


def carried(error: BaseException) -> KnapFormerError:
    """As an error that can be raised on other ranks."""
    return error if isinstance(error, KnapFormerError) else RankError(told(error))


def told(error: BaseException) -> str:
    """What kind of exception, and its words if it has any."""
    return ": ".join(part for part in (type(error).__name__, str(error)) if part)


def where_apart(own: Any, theirs: Any) -> tuple[str, Any, Any]:
    """Where two values differ, and how: one element of long lists of equal length, else all of them."""
    if isinstance(own, list) and isinstance(theirs, list) and len(own) == len(theirs) > MOST_NAMED:
        i = next(i for i, (a, b) in enumerate(zip(own, theirs, strict=True)) if a != b)
        return f"[{i}]", own[i], theirs[i]
    return "", own, theirs


def waited_in_vain(what: str, peers: Sequence[int], began: float | None, error: RuntimeError | None) -> str:
    """What a rank has waited for, how long, and what ended that.

    Args:
        began: a time of ``time.monotonic``; None where it did not wait.
        error: of the transport; None where what ended the wait is said elsewhere.
    """
    seconds = 0.0 if began is None else time.monotonic() - began
    ranks = ", ".join(map(str, peers[:MOST_NAMED])) + ", …" * (len(peers) > MOST_NAMED)
    waited = f"waited {seconds:.1f} s in {what} for rank{'s' * (len(peers) != 1)} {ranks}"
    if error is None:
        return waited
    is_late = re.search("timed? ?out", str(error), re.IGNORECASE)
    return f"{waited}: {'the timeout is over' if is_late else 'a connection was closed'}"


def as_error(kind: str, text: str) -> KnapFormerError:
    """An error that another rank has raised."""
    return next((e for e in ERRORS if e.__name__ == kind), RankError)(text)


def naming(rank: int, error: KnapFormerError) -> str:
    """The text of a rank's own error, with its rank."""
    text = str(error)
    return text if f"rank {rank}" in text else f"rank {rank}: {text}"
