"""What the commands share: values of options, results files and progress bars."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from knapformer.errors import ConfigurationError

MOST_CAP_DIGITS = 12

PACKAGES = {"skimage": "scikit-image", "PIL": "Pillow"}
"""Names of packages that are imported under others."""


def parse_cap(text: str) -> int | Literal["auto"] | None:
    """The value of ``--max-tokens-per-rank``."""
    if text == "auto":
        return "auto"
    if text == "none":
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"--max-tokens-per-rank must be a number, auto or none, got {text[:60]!r}")
    if len(text) > MOST_CAP_DIGITS:
        raise ConfigurationError(f"--max-tokens-per-rank must have at most {MOST_CAP_DIGITS} digits, got {text[:60]}")
    return int(text)


def parse_names(option: str, text: str) -> list[str]:
    """The names that a value joins by commas; none for an empty value.

    Raises:
        ConfigurationError: a value of commas alone.
    """
    names = [name for name in text.split(",") if name]
    if text and not names:
        raise ConfigurationError(f"{option} must be names joined by commas, got {text!r}")
    return names


def stamp() -> dict[str, Any]:
    """When, by which command and version."""
    from knapformer.version import __version__

    created = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"created": created, "command": " ".join(["knapformer", *sys.argv[1:]]), "version": __version__}


def write_json(file: Path, content: Any) -> None:
    """Write a results file, and its folder."""
    write_text(file, json.dumps(content, indent=1) + "\n")


def check_output(name: str, file: Path | None) -> None:
    """Check that a file can be written, and leave nothing behind.

    Raises:
        ConfigurationError: it is a folder, its folder cannot be made, or one may not write there.
    """
    if file is None:
        return
    try:
        if file.exists():
            with file.open("ab"):
                return
        folder = next(parent for parent in file.absolute().parents if parent.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(f"--{name} {file}: cannot be written: {error.strerror or error}") from None


def companion(file: Path, suffix: str) -> Path:
    """The file of another kind that goes beside an output, checked as that is.

    Raises:
        ConfigurationError: it is the output itself, or cannot be written.
    """
    beside = file.with_suffix(suffix)
    if beside == file:
        raise ConfigurationError(f"--output {file}: a file of this name goes beside it: give it another ending")
    check_output("output", beside)
    return beside


def require_packages(what: str, extra: str, *modules: str) -> None:
    """Check that optional packages are there, without importing them.

    Args:
        what: needs them.
        extra: of the package that brings them.
        modules: as they are imported.

    Raises:
        ConfigurationError: naming those that are missing.
    """
    missing = [PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"{what} needs {' and '.join(missing)}: pip install 'knapformer[{extra}]'")


def write_text(file: Path, text: str) -> None:
    """Write a file, and its folder."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def check_picture(picture: Path | None, as_json: bool) -> None:
    """Raise ``ConfigurationError`` where a picture of tables is wanted and no tables."""
    if picture is not None and as_json:
        raise ConfigurationError("--picture draws the tables, which --json leaves out: give one of them")


@contextmanager
def pictured(picture: Path | None, title: str) -> Iterator[Console]:
    """A console for tables; what it printed is an SVG file afterwards, where one is wanted."""
    console = Console(record=picture is not None)
    yield console
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        console.save_svg(str(picture), title=title)


@contextmanager
def progress_bar(name: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; call what it yields after each of ``total`` pieces of work, None where that is open."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(name, total=total)
        yield lambda: bars.advance(task)


def checked_shard_size(given: int | None, num_ranks: int, ranks_per_node: int) -> int:
    """The value of ``--shard-size``; without it as much of a node as divides the ranks.

    Raises:
        ConfigurationError: it does not divide the ranks.
    """
    shard = math.gcd(num_ranks, ranks_per_node) if given is None else given
    if num_ranks % shard:
        raise ConfigurationError(f"--shard-size must divide {num_ranks} ranks, got {shard}")
    return shard
