"""The lengths of a data set's samples, from a table or a lengths file, and batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from knapformer.errors import ConfigurationError, LengthsError
from knapformer.given.lengths import MAX_LENGTH_TOKENS, Lengths, read_lengths
from knapformer.given.shapes import ModelShape

IntArray = npt.NDArray[np.int64]

LENGTH_COLUMNS = ("length", "lengths", "tokens", "num_tokens")
SIZE_COLUMNS = ("width", "height")
OPTIONAL_COLUMNS = ("frames", "text_tokens")


def read_dataset(path: str | Path, shape: ModelShape) -> IntArray:
    """(S,) tokens of each sample.

    Args:
        path: JSON as of ``read_lengths``, whose ranks do not matter here; or a CSV or Parquet table with a column
            ``length`` (tokens), or with ``width`` and ``height`` in pixels, ``frames`` where there are videos, and
            ``text_tokens``, which count in a model with joint attention.
        shape: turns pixels and frames into tokens.

    Raises:
        ConfigurationError: the file cannot be read, has no row or not these columns.
        LengthsError: a value is no count, with its row.
    """
    path = Path(path)
    if path.suffix == ".json":
        tokens = read_lengths(path).tokens
        if not len(tokens):
            raise ConfigurationError(f"{path} has no sequences")
        return tokens
    table = _read_table(path)
    if not len(table):
        raise ConfigurationError(f"{path} has no rows")
    names = {str(name).strip().lower(): name for name in table.columns}
    for name in LENGTH_COLUMNS:
        if name in names:
            return _counts(path, table[names[name]], name, minimum=1)
    if not set(SIZE_COLUMNS) <= set(names):
        raise ConfigurationError(
            f"{path} needs a column {LENGTH_COLUMNS[0]}, or columns width and height (and frames, text_tokens), "
            f"got {list(map(str, table.columns))}"
        )
    width, height = (_counts(path, table[names[name]], name, minimum=1) for name in SIZE_COLUMNS)
    frames = _counts(path, table[names["frames"]], "frames", minimum=1) if "frames" in names else np.ones_like(width)
    text = np.zeros_like(width)
    if "text_tokens" in names:
        text = np.minimum(_counts(path, table[names["text_tokens"]], "text_tokens", minimum=0), shape.max_text_tokens)
    tokens = sample_tokens(shape, width, height, frames, text)
    if tokens.max() > MAX_LENGTH_TOKENS:
        row = int(np.flatnonzero(tokens > MAX_LENGTH_TOKENS)[0])
        size = f"{width[row]} × {height[row]} pixels, {frames[row]} frames"
        raise LengthsError(f"{path}: row {row + 1}: {size} are more than {MAX_LENGTH_TOKENS} tokens")
    return tokens


def sample_tokens(
    shape: ModelShape, width: IntArray, height: IntArray, frames: IntArray, text_tokens: IntArray
) -> IntArray:
    """(S,) what ``shape.tokens`` gives for each sample; more than ``MAX_LENGTH_TOKENS`` where that is more."""
    pixels, multiple = shape.pixels_per_token, shape.stream_multiple
    too_many = MAX_LENGTH_TOKENS + 1
    image = -(-height // pixels) * -(-width // pixels)
    visual = np.minimum(image, too_many) * ((frames - 1) // shape.temporal_rate + 1)
    text = text_tokens if shape.joint else np.zeros_like(text_tokens)
    streams = (np.minimum(visual, too_many), text)
    return np.asarray(sum(-(-stream // multiple) * multiple for stream in streams))


def _read_table(path: Path) -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigurationError(f"reading {path} needs pandas: pip install knapformer[data]") from None
    readers = {".csv": pandas.read_csv, ".tsv": lambda p: pandas.read_csv(p, sep="\t"), ".parquet": pandas.read_parquet}
    if path.suffix.lower() not in readers:
        found = path.suffix or path.name
        raise ConfigurationError(f"{path}: expected a .json, .csv, .tsv or .parquet file, got {found!r}")
    if not path.is_file():
        raise ConfigurationError(f"cannot read {path}: there is no such file")
    try:
        return readers[path.suffix.lower()](path)
    except pandas.errors.EmptyDataError:
        raise ConfigurationError(f"{path} is empty") from None
    except ImportError:
        raise ConfigurationError(f"reading {path} needs pyarrow: pip install knapformer[data]") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigurationError(f"cannot read {path}: {reason}") from None


def _counts(path: Path, column: Any, name: str, *, minimum: int) -> IntArray:
    """The column as integers; rows are numbered from 1, without the header."""
    import pandas

    values = pandas.to_numeric(column, errors="coerce").to_numpy(np.float64)
    valid = np.isfinite(values) & (values == np.floor(values)) & (values >= minimum) & (values <= MAX_LENGTH_TOKENS)
    if not valid.all():
        row = int(np.flatnonzero(~valid)[0])
        value = column.iloc[row]
        value = value.item() if isinstance(value, np.generic) else value
        raise LengthsError(f"{path}: row {row + 1}: {name} must be an integer of at least {minimum}, got {value!r}")
    whole: IntArray = values.astype(np.int64)
    return whole


def random_steps(
    tokens: IntArray, *, num_ranks: int, tokens_per_rank: int, num_steps: int, rng: np.random.Generator
) -> list[Lengths]:
    """Steps as a shuffling loader makes them: each rank takes samples until one more would pass its tokens."""
    batches = _batches(_endless(tokens, rng), tokens_per_rank)
    return [Lengths.from_ranks([next(batches) for _ in range(num_ranks)]) for _ in range(num_steps)]


def grouped_steps(
    tokens: IntArray, *, num_ranks: int, tokens_per_rank: int, num_steps: int, rng: np.random.Generator
) -> list[Lengths]:
    """Steps of length-grouped batching: a rank's batch has like lengths, and which batches meet in a step is chance."""
    batches = _batches(_endless(tokens, rng), tokens_per_rank)
    pool = [length for _ in range(num_ranks * num_steps) for length in next(batches)]
    # A batch of the longest samples may hold fewer tokens than others, so there may be a few more batches than needed.
    grouped = list(_batches(iter(sorted(pool)), tokens_per_rank))
    while len(grouped) < num_ranks * num_steps:
        grouped.append(next(batches))
    order = rng.permutation(len(grouped))[: num_ranks * num_steps].reshape(num_steps, num_ranks)
    return [Lengths.from_ranks([grouped[i] for i in step]) for step in order]


def _endless(tokens: IntArray, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from rng.permutation(tokens).tolist()


def _batches(samples: Iterator[int], tokens_per_rank: int) -> Iterator[list[int]]:
    """At least one sample each; the last one may be short."""
    batch: list[int] = []
    held = 0
    for length in samples:
        if batch and held + length > tokens_per_rank:
            yield batch
            batch, held = [], 0
        batch.append(length)
        held += length
    if batch:
        yield batch
