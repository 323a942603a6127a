"""Who holds which sequences: the lengths of one step over all ranks of a balancing group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError, KnapFormerError, LengthsError
from knapformer.given.files import read_object

IntArray: TypeAlias = npt.NDArray[np.int64]

MAX_LENGTH_TOKENS = 2**31 - 1
"""Longest sequence that is accepted; FlashAttention and its relatives index tokens with 32 bits."""

MAX_RANKS = 2**20
"""Ranks of a balancing group that are accepted."""


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The sequence lengths of one step.

    Sequence ids follow (home rank, position in that rank's batch), so the sequences of a rank are consecutive.

    Attributes:
        tokens: (S,) tokens of each sequence, the sum of its streams.
        offsets: (N + 1,) ids ``offsets[r]:offsets[r + 1]`` are at home on rank ``r``.
        streams: named parts of each sequence in the order in which they are stored inside it, each (S,);
            empty when the lengths are plain numbers.
    """

    tokens: IntArray
    offsets: IntArray
    streams: tuple[tuple[str, IntArray], ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "offsets"):
            object.__setattr__(self, name, integer_column(name, getattr(self, name), np.int64, LengthsError))
        streams = tuple(
            (name, integer_column(f"stream {name!r}", part, np.int64, LengthsError)) for name, part in self.streams
        )
        object.__setattr__(self, "streams", streams)
        for name, part in (("tokens", self.tokens), *streams):
            if len(part) and not 0 <= part.min() <= part.max() <= MAX_LENGTH_TOKENS:
                raise LengthsError(f"{name} must be in 0..{MAX_LENGTH_TOKENS}, got {part.min()}..{part.max()}")
        if not len(self.offsets):
            raise LengthsError("offsets must begin with 0, got none")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or (np.diff(self.offsets) < 0).any():
            raise LengthsError(f"offsets must rise from 0 to {len(self.tokens)} sequences, got {self.offsets.tolist()}")
        if self.streams and not np.array_equal(sum(part for _, part in self.streams), self.tokens):
            raise LengthsError("the streams of a sequence must sum to its length")

    @classmethod
    def from_ranks(cls, ranks: Sequence[Any]) -> Lengths:
        """Collect each rank's own lengths: integers, or a mapping of stream names to integers.

        Raises:
            LengthsError: naming the rank whose lengths are no non-negative integers, or whose streams differ.
        """
        if isinstance(ranks, str | bytes) or not isinstance(ranks, Iterable):
            raise LengthsError(f"expected the lengths of each rank, got {ranks!r}")
        parsed = []
        for rank, local in enumerate(ranks):
            try:
                parsed.append(parse_local_lengths(local))
            except LengthsError as error:
                raise LengthsError(f"rank {rank}: {error}") from None
        names = next((tuple(p) for p in parsed), ("",))
        for rank, streams in enumerate(parsed):
            if tuple(streams) != names:
                raise LengthsError(f"rank {rank}: its streams are {list(streams)}, rank 0 has {list(names)}")
        return cls.from_streams([np.stack(list(streams.values())) for streams in parsed], names)

    @classmethod
    def from_streams(cls, ranks: Sequence[IntArray], names: tuple[str, ...] = ("",)) -> Lengths:
        """Join per-rank (streams, local sequences) arrays; the only stream of plain lengths is named ``""``."""
        table = np.concatenate(ranks, axis=1) if ranks else np.zeros((len(names), 0), np.int64)
        offsets = np.concatenate([[0], np.cumsum([part.shape[1] for part in ranks], dtype=np.int64)])
        streams = () if names == ("",) else tuple(zip(names, table.copy(), strict=True))
        return cls(table.sum(axis=0, dtype=np.int64), offsets.astype(np.int64), streams)

    @property
    def num_ranks(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_sequences(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return int(self.tokens.sum())

    @property
    def homes(self) -> npt.NDArray[np.int32]:
        """(S,) the rank that loaded each sequence."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    def of_rank(self, rank: int) -> IntArray:
        """The lengths that ``rank`` loaded, in its own order."""
        return self.tokens[self.offsets[rank] : self.offsets[rank + 1]]

    def stream_starts(self) -> IntArray:
        """(streams + 1, S) where each stream starts inside its sequence; the last row is the length."""
        parts = [part for _, part in self.streams] or [self.tokens]
        return np.concatenate([np.zeros((1, self.num_sequences), np.int64), np.cumsum(np.stack(parts), axis=0)])

    def to_lists(self) -> list[list[int]]:
        return [self.of_rank(rank).tolist() for rank in range(self.num_ranks)]


def parse_local_lengths(lengths: Any) -> dict[str, IntArray]:
    """Check one rank's own lengths and return them as streams; plain lengths become the one stream ``""``.

    Args:
        lengths: a list, array or tensor of non-negative integers, or a mapping of stream names to such lists, of the
            same number of sequences.

    Raises:
        LengthsError: naming the position and the value that is not a length.
    """
    if isinstance(lengths, Mapping):
        streams = {str(name): _parse_stream(values, f"stream {name!r}, ") for name, values in lengths.items()}
        counts = {name: len(values) for name, values in streams.items()}
        if len(set(counts.values())) != 1:
            raise LengthsError(f"every stream must list the same sequences, got counts {counts}")
        if "" in streams or len(streams) < len(lengths):
            raise LengthsError(f"every stream needs a name of its own, got {list(lengths)}")
        longest = int(np.sum(list(streams.values()), axis=0).max(initial=0))
        if longest > MAX_LENGTH_TOKENS:
            raise LengthsError(f"the streams of a sequence must sum to {MAX_LENGTH_TOKENS} at most, got {longest}")
        return streams
    return {"": _parse_stream(lengths, "")}


def integer_column(name: str, values: Any, dtype: Any, error: type[KnapFormerError]) -> Any:
    """An array of its own, so that nobody else can change it; nothing is rounded or wrapped.

    Raises:
        KnapFormerError: of type ``error``; the values are no integers of ``dtype``, or not in one dimension.
    """
    given = np.asarray(values)
    if given.ndim != 1 or (len(given) and given.dtype.kind not in "iu"):
        raise error(f"{name} must be integers in one dimension, got {given.dtype} of shape {given.shape}")
    column = np.array(given, dtype)
    if given.dtype != column.dtype and not np.array_equal(given, column):
        raise error(f"{name} must be {column.dtype} integers, got {given.min()}..{given.max()}")
    column.setflags(write=False)
    return column


def _parse_stream(values: Any, where: str) -> IntArray:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise LengthsError(f"{where}lengths must be a list of non-negative integers, got {values!r}")
    if set(map(type, values)) <= {int} and (not values or 0 <= min(values) <= max(values) <= MAX_LENGTH_TOKENS):
        return np.asarray(values, dtype=np.int64)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise LengthsError(f"{where}sequence {position}: a length must be an integer, got {value!r}")
        if not 0 <= value <= MAX_LENGTH_TOKENS:
            raise LengthsError(f"{where}sequence {position}: a length must be in 0..{MAX_LENGTH_TOKENS}, got {value}")
    return np.asarray(values, dtype=np.int64)


def read_lengths(path: str | Path) -> Lengths:
    """Read a lengths file ``{"lengths": [[rank 0's lengths], [rank 1's], …]}``.

    Raises:
        ConfigurationError: the file cannot be read, is no JSON or has another shape.
        LengthsError: a value in it is no length.
    """
    rows = read_object(path, "a lengths file").get("lengths")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list | dict) for row in rows):
        raise ConfigurationError(f"{path}: expected {{\"lengths\": [[rank 0's lengths], [rank 1's], …]}}")
    try:
        return Lengths.from_ranks(rows)
    except LengthsError as error:
        raise LengthsError(f"{path}: {error}") from None
