"""Every parser on contents that Hypothesis makes of right ones, and on the corpus: one line of ours, or the laws hold.

``python scripts/fuzz.py`` tries many more, and adds to the corpus what breaks a parser.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_cases import CORPUS, PARSERS, BrokenParserError, Parser, check_lengths, fuzz, outcome
from hypothesis.errors import HypothesisException

from knapformer.errors import ConfigurationError, KnapFormerError
from knapformer.given.lengths import Lengths

EXAMPLES = {name: 25 if name == "results file" else 120 for name in PARSERS}
"""Pages are slow to make."""


@pytest.mark.parametrize("name", PARSERS)
def test_whatever_is_read_is_refused_in_a_line_or_keeps_the_laws(name: str, tmp_path: Path) -> None:
    counts = fuzz(PARSERS[name], tmp_path, max_examples=EXAMPLES[name])
    assert counts["refused"] and counts["accepted"], counts


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*/*")), ids=lambda file: f"{file.parent.name}/{file.name}")
def test_corpus(file: Path, tmp_path: Path) -> None:
    expected = file.name.partition("-")[0]
    assert outcome(PARSERS[file.parent.name.replace("_", " ")], file.read_bytes(), tmp_path) == expected


def careless_lengths(file: Path) -> Lengths:
    return Lengths.from_ranks(json.loads(file.read_bytes())["lengths"])


def wordy_lengths(file: Path) -> Lengths:
    try:
        return careless_lengths(file)
    except Exception as error:
        raise ConfigurationError(f"no lengths:\n{error}") from error


def lost_lengths(file: Path) -> Lengths:
    found = PARSERS["lengths file"].read(file)
    return Lengths(found.tokens[:-1], found.offsets.clip(max=len(found.tokens) - 1), ())


@pytest.mark.parametrize("read", [careless_lengths, wordy_lengths, lost_lengths])
def test_fuzzing_finds_parsers_that_are_wrong(read: object, tmp_path: Path) -> None:
    """A traceback, an error of two lines, and a value that was lost."""
    right = PARSERS["lengths file"]

    def check(found: Lengths) -> None:
        check_lengths(found)
        content = json.loads((tmp_path / "f.json").read_bytes())["lengths"]
        assert found.num_sequences == sum(
            len(row) if isinstance(row, list) else len(next(iter(row.values()))) for row in content
        )

    broken: Parser = replace(right, read=read, check=check)
    with pytest.raises(BrokenParserError) as caught:
        fuzz(broken, tmp_path, max_examples=60)
    assert not isinstance(caught.value.__cause__, KnapFormerError | HypothesisException)
