"""The one list of workloads. Whatever names a workload (commands, help texts, errors) reads it.

To add one, write a function from a ``Request`` to the lengths of one step and register it:

    @register_workload("twins:RANKS:LENGTH", summary="one sequence of LENGTH tokens a rank", model="flux.1-dev")
    def twins(request: Request) -> Rows: ...

A pattern's words in capitals are numbers; the last one may stand in brackets and then has a default. A name without
them stands for itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from knapformer.errors import ConfigurationError
from knapformer.given.shapes import model_shape

Rows: TypeAlias = list[list[int]]
"""Per rank, the lengths of the sequences it loads."""

MAX_SEQUENCES = 2**20
"""Of a step; a name that means more is a mistake, and would fill the memory."""

MAX_DRAWN_RANKS = 2**16

MAX_DRAWN_SEQUENCES = 2**22
"""Of all steps together."""


def check_drawn(num_steps: int, num_sequences: float, advice: str) -> None:
    """Call it before the steps are drawn.

    Args:
        num_steps: to draw.
        num_sequences: of one step, or about so many.
        advice: what to ask for instead.

    Raises:
        ConfigurationError: one step, or all together, would have too many sequences.
    """
    for what, value, most in (
        ("a step", num_sequences, MAX_SEQUENCES),
        (f"{num_steps:,} steps", num_steps * num_sequences, MAX_DRAWN_SEQUENCES),
    ):
        if value > most:
            raise ConfigurationError(f"{what} would have about {value:,.0f} sequences, at most {most:,}: {advice}")


_COUNT = re.compile(r"[1-9]\d{0,15}")
_SHARE = re.compile(r"0(?:\.\d*)?|\.\d+|1(?:\.0*)?")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One step that is asked for.

    Attributes:
        name: as it was given.
        pattern: that it follows.
        values: by the pattern's words.
        rng: advanced; draws follow one another as a training run's steps do.
        num_ranks: as asked for beside the name; None leaves it to the workload.
    """

    name: str
    pattern: str
    values: dict[str, str]
    rng: random.Random
    num_ranks: int | None = None

    def count(self, word: str, default: int | None = None) -> int:
        """The integer of at least 1 that stands for ``word``.

        Raises:
            ConfigurationError: it is none.
        """
        if word not in self.values and default is not None:
            return default
        return int(self._checked(word, _COUNT))

    def share(self, word: str) -> float:
        """The number from 0 to 1 that stands for ``word``.

        Raises:
            ConfigurationError: it is none.
        """
        return float(self._checked(word, _SHARE))

    def check_size(self, num_ranks: int, num_sequences: int) -> None:
        """Call it before drawing.

        Raises:
            ConfigurationError: the step would have too many ranks or sequences.
        """
        for what, value, most in (("ranks", num_ranks, MAX_DRAWN_RANKS), ("sequences", num_sequences, MAX_SEQUENCES)):
            if value > most:
                raise ConfigurationError(f"workload {self.name!r} would have {value:,} {what}, at most {most:,}")

    def _checked(self, word: str, form: re.Pattern[str]) -> str:
        value = self.values.get(word, "")
        if form.fullmatch(value) is None:
            raise malformed(self.name, self.pattern)
        return value


Draw: TypeAlias = Callable[[Request], Rows]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A workload as commands know it.

    Attributes:
        pattern: how its name is written.
        draw: the lengths of one step; equal requests give equal lengths.
        summary: what it is, in a few words.
        model: that trains on such lengths; None for one that is of no model.
    """

    pattern: str
    draw: Draw
    summary: str
    model: str | None = None

    def read(self, name: str) -> dict[str, str]:
        """The values in a name, by the pattern's words.

        Raises:
            ConfigurationError: it has too few or too many.
        """
        words = self.pattern.replace("[:", ":").replace("]", "").split(":")[1:]
        values = name.split(":")[1:]
        if not len(words) - self.pattern.count("[") <= len(values) <= len(words):
            raise malformed(name, self.pattern)
        return dict(zip(words, values, strict=False))


WORKLOADS: dict[str, Workload] = {}
"""By what stands before a pattern's first colon, in the order in which tables show them."""


def register_workload(pattern: str, *, summary: str, model: str | None = None) -> Callable[[Draw], Draw]:
    """Add a workload under its pattern; the arguments are ``Workload``'s.

    Raises:
        ConfigurationError: the name is taken or could not stand on a command line, or the model is not known.
    """
    name = pattern.partition(":")[0]
    if name in WORKLOADS:
        raise ConfigurationError(f"there is a workload {name!r} already")
    if not name or not pattern.isprintable() or any(mark in pattern for mark in " ,"):
        raise ConfigurationError(f"a workload's pattern has a name and no spaces or commas, got {pattern!r}")
    if model is not None:
        model_shape(model)

    def add(draw: Draw) -> Draw:
        WORKLOADS[name] = Workload(pattern, draw, summary, model)
        return draw

    return add


def workload_names() -> list[str]:
    """Every pattern, for help texts and errors."""
    return [workload.pattern for workload in WORKLOADS.values()]


def malformed(name: str, pattern: str) -> ConfigurationError:
    """The error for a name that does not follow its pattern."""
    return ConfigurationError(
        f"workload {name!r} is not of the form {pattern} with counts of at least 1 and a share in 0..1"
    )
