"""What ranks agree on before any token moves: lengths, configuration, plan, and the calls that they have made.

It goes over a CPU group of its own, so that it neither waits for the device nor gets between the exchanges of a step
that runs meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knapformer.errors import DisagreementError, KnapFormerError, LengthsError, RankError
from knapformer.execution.calls import CHECK, PREPARE, first_difference
from knapformer.execution.telling import as_error, carried, naming, told, where_apart
from knapformer.execution.transport import Members, all_gather, gather_text
from knapformer.given.lengths import IntArray, Lengths, parse_local_lengths
from knapformer.schedules.meetings import Links, connected

STRAYS = 6
"""Column of a header: whether messages of other calls have arrived."""


@dataclass(frozen=True, slots=True)
class LocalInput:
    """What one rank brings to a step.

    Attributes:
        streams: tokens of each local sequence, by stream; ``{"": …}`` where streams have no names.
        conditioning: rows of ragged conditioning of each local sequence, by name.
        error: what went wrong on this rank instead.
    """

    streams: Mapping[str, IntArray]
    conditioning: Mapping[str, IntArray]
    error: KnapFormerError | None = None

    @classmethod
    def collect(
        cls,
        parse: Callable[[], dict[str, IntArray]],
        num_rows: int | None,
        error: BaseException | None,
        conditioning: Mapping[str, Any] | None,
    ) -> LocalInput:
        """Everything that can be wrong on this rank alone, as an error that is carried to all ranks.

        Args:
            parse: gives the streams, or raises.
            num_rows, error, conditioning: see ``knapformer.Balancer.prepare``.
        """
        try:
            if error is not None:
                raise RankError(told(error))
            streams = parse()
            num_tokens = sum(int(part.sum()) for part in streams.values())
            if num_rows is not None and num_tokens != num_rows:
                raise LengthsError(f"the lengths sum to {num_tokens} tokens, the tensors have {num_rows} rows")
            count = len(next(iter(streams.values())))
            rows = parse_local_lengths(conditioning) if conditioning else {}
            for name, part in rows.items():
                if len(part) != count:
                    raise LengthsError(f"conditioning {name!r} lists {len(part)} sequences, the lengths {count}")
            return cls(streams, rows)
        except Exception as failure:  # whatever it is, the other ranks wait
            return cls({}, {}, carried(failure))


def gather_inputs(
    group: Members, local: LocalInput, configuration: Mapping[str, Any]
) -> tuple[Lengths, dict[str, IntArray]]:
    """The lengths, and ragged conditioning rows (S,), of all ranks. Every rank of the group calls it.

    Raises:
        KnapFormerError: of the type and with the text of the lowest rank's error, on all ranks, naming that rank.
        DisagreementError: ranks run other configurations or versions, or name other streams; on all ranks.
    """
    columns = [*local.streams.values(), *local.conditioning.values()]
    numbers = np.concatenate(columns) if columns and local.error is None else np.zeros(0, np.int64)
    names = [list(local.streams), list(local.conditioning)] if local.error is None else []
    if group.calls is not None:
        group.calls.num_steps += 1
        group.calls.outside(PREPARE)
    counts = agree(group, configuration, names, local.error, len(numbers))
    gathered = all_gather(group, numbers, counts)
    tables = [own.reshape(len(columns), -1) for own in gathered]
    num_streams = len(local.streams)
    lengths = Lengths.from_streams([table[:num_streams] for table in tables], tuple(local.streams))
    rows = np.concatenate([table[num_streams:] for table in tables], axis=1)
    return lengths, dict(zip(local.conditioning, rows, strict=True))


def agree(
    group: Members,
    configuration: Mapping[str, Any],
    names: list[list[str]],
    error: KnapFormerError | None,
    number: int = 0,
) -> list[int]:
    """``number`` of every rank, where no rank has an error and all have the same configuration, names and calls."""
    calls = group.calls
    transcript = None if calls is None else calls.transcript
    digests = (0, 0) if transcript is None else transcript.digests
    has_strays = calls is not None and calls.marks is not None and calls.marks.known()
    header = [number, int(error is not None), _hash(configuration), _hash(names), *digests, int(has_strays)]
    headers = all_gather(group, np.asarray(header, np.int64))
    if calls is not None:
        calls.compared()
    if headers[:, [1, STRAYS]].any() or (headers[:, 2:] != headers[0, 2:]).any():
        content = {"configuration": configuration, "names": names, "error": _error_dict(error)}
        if transcript is not None and calls is not None:
            content |= {
                "calls": list(transcript.told()),
                "failures": [[type(e).__name__, naming(calls.rank, e)] for e in transcript.failures],
            }
        links = [] if transcript is None else [found() for found in transcript.links.values()]
        found = _disagreement(group, json.dumps(content, default=_plain).encode(), headers, links)
        if found is not None:
            raise found
    numbers: list[int] = headers[:, 0].tolist()
    return numbers


def compare_calls(group: Members) -> None:
    """Compare the calls of all ranks since the last ``prepare``. Every rank of the group calls it.

    Raises:
        DisagreementError, or what a rank raised in a call: the same on all ranks.
    """
    if group.calls is not None:
        group.calls.outside(CHECK)
        agree(group, {}, [], None)


def begin_step(group: Members, configuration: Mapping[str, Any]) -> None:
    """Begin a step that was agreed on beside the steps before it: compare the calls of all ranks up to here. Every rank
    of the group calls it.

    Raises:
        DisagreementError, or what a rank raised in a call: the same on all ranks.
    """
    if group.calls is not None:
        group.calls.num_steps += 1
        group.calls.outside(PREPARE)
        agree(group, configuration, [], None)


def agree_on_plan(group: Members, digest: bytes | None, error: KnapFormerError | None) -> None:
    """Check that all ranks made the same plan. Every rank of the group calls it.

    Args:
        digest: 32 bytes of this rank's plan; None where planning failed.
        error: why it failed.

    Raises:
        KnapFormerError: planning failed on a rank; the same on all ranks.
        DisagreementError: the plans differ; on all ranks.
    """
    own = np.frombuffer(digest or bytes(32), np.int64)
    table = all_gather(group, np.append(own, int(error is not None)))
    if table[:, -1].any():
        found = _disagreement(group, json.dumps({"error": _error_dict(error)}).encode())
        assert found is not None
        raise found
    differing = np.flatnonzero((table != table[0]).any(axis=1))
    if len(differing):
        raise DisagreementError(f"rank {differing[0]} made another plan than rank 0 from the same lengths")


def _disagreement(
    group: Members, text: bytes, headers: Any = None, links: Sequence[Links] = ()
) -> KnapFormerError | None:
    """Every rank's own words, gathered, as the one error that all ranks raise; every rank of the group calls it.

    Args:
        text: this rank's words.
        headers: of all ranks.
        links: which ranks the steps that were used connect. Ranks that nothing connects may differ in what ran
            backward, because what needs gradients was agreed without them.

    Returns:
        None where only such ranks differ.
    """
    said = [json.loads(words) for words in gather_text(group, text)]
    for rank, words in enumerate(said):
        if words["error"] is not None:
            same = all(other["error"] == words["error"] for other in said)
            kind, wrong = words["error"]
            return as_error(kind, wrong if same and kind != RankError.__name__ else f"rank {rank}: {wrong}")
    for rank, words in enumerate(said):
        for key, value in words["configuration"].items():
            first = said[0]["configuration"].get(key)
            if value != first:
                place, own, theirs = where_apart(value, first)
                return DisagreementError(f"rank {rank} has {key}{place} {own!r}, rank 0 has {theirs!r}")
        if words["names"] != said[0]["names"]:
            return DisagreementError(
                f"rank {rank} names streams and conditioning {words['names']}, rank 0 {said[0]['names']}"
            )
    assert group.calls is not None
    verdict = _other_calls(said, headers, connected(links, group.size))
    if verdict is not None:  # ranks that have made different calls cannot go on
        group.calls.verdict = verdict
    return verdict


def _other_calls(said: Sequence[Mapping[str, Any]], headers: Any, label: IntArray) -> KnapFormerError | None:
    """The first rank that made other calls than rank 0 or, in everything, than the lowest rank it is connected with."""
    for rank, words in enumerate(said):
        for column, other in ((4, 0), (5, int(label[rank]))):
            if headers[rank, column] == headers[other, column]:
                continue
            own, theirs = words["failures"], said[other]["failures"]
            if len(own) != len(theirs):
                kind, wrong = max(own, theirs, key=len)[min(len(own), len(theirs))]
                return as_error(kind, wrong)
            told = zip(said[other]["calls"], words["calls"], strict=True)
            found = [first_difference(calls, [other, rank]) for calls in told]
            return DisagreementError(next(filter(None, found), "ranks disagree, but say the same: a hash collision"))
    strays = np.flatnonzero(headers[:, STRAYS])
    if len(strays):
        return DisagreementError(f"rank {strays[0]} has received messages of other calls than it made")
    return None


def _error_dict(error: KnapFormerError | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _hash(content: Any) -> int:
    """63 bits that are the same on every machine."""
    return (
        int.from_bytes(
            hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).digest()[:8], "little"
        )
        >> 1
    )


def _plain(value: Any) -> Any:
    """What JSON holds of anything else; a rank that could not say what it has would leave the others waiting."""
    return value.tolist() if hasattr(value, "tolist") else repr(value)
