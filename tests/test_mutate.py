"""The mutation run's faults: what is changed, what is left alone, and how a fault is found again."""

from __future__ import annotations

import ast
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import mutate

SOURCE = '''"""Doc: 1."""
from typing import Literal

def f(x: Literal[3], *, deep: bool = True) -> int:
    """Doc: 2."""
    if x < 4 and not deep:
        raise ValueError(f"got {x + 5}")
    total = sum(y - 1 for y in range(x) if y)
    total += 2
    return g(total, key="ä", strict=True)
'''


def faults(source: str) -> list[tuple[int, str, str, str]]:
    return [(m.line, m.operator, m.before, m.after) for m in mutate.mutants_of("f.py", source)]


def test_faults_of_a_few_lines() -> None:
    whole = 'raise ValueError(f"got {x + 5}")'
    assert sorted(faults(SOURCE)) == sorted(
        [
            (4, "constant", "True", "False"),
            (6, "condition", "x < 4 and not deep", "(not (x < 4 and (not deep)))"),
            (6, "boolean", "x < 4 and not deep", "(x < 4 or not deep)"),
            (6, "comparison", "x < 4", "x <= 4"),
            (6, "constant", "4", "5"),
            (6, "constant", "4", "(3)"),
            (6, "sign", "not deep", "(deep)"),
            (7, "statement", whole, "pass"),
            (8, "arithmetic", "y - 1", "(y + 1)"),
            (8, "constant", "1", "2"),
            (8, "constant", "1", "(0)"),
            (8, "condition", "y", "(not (y))"),
            (9, "statement", "total += 2", "pass"),
            (9, "constant", "2", "3"),
            (9, "constant", "2", "(1)"),
            (10, "keyword", 'g(total, key="ä", strict=True)', "g(total, strict=True)"),
        ]
    )


def test_each_fault_changes_one_place_and_can_be_compiled() -> None:
    for mutant in mutate.mutants_of("f.py", SOURCE):
        changed = mutant.applied(SOURCE.encode()).decode()
        ast.parse(changed)
        assert changed.replace(mutant.after, mutant.before, 1) == SOURCE or SOURCE.count(mutant.before) > 1
        assert changed != SOURCE


@pytest.mark.parametrize("module", mutate.TESTS)
def test_every_fault_of_the_package_can_be_compiled_and_has_tests(module: str) -> None:
    chosen, possible = mutate.sampled(module, 5, seed=1)
    assert len(chosen) == min(5, possible) and mutate.sampled(module, 5, seed=1)[0] == chosen
    for mutant in chosen:
        ast.parse(mutant.applied((mutate.ROOT / mutant.file).read_bytes()))
    named = [test for tests in mutate.TESTS[module] for test in tests if not test.startswith("-")]
    assert all((mutate.ROOT / test.split("::")[0]).exists() for test in named)


def test_a_survivor_is_found_again_where_its_code_stands_today() -> None:
    (mutant, *_), _ = mutate.sampled("plans/plan", 1, seed=0)
    moved = replace(mutant, line=mutant.line + 7, end_line=mutant.end_line + 7, killed_by="", why="equivalent")
    gone = replace(moved, code="no such line")
    killed = replace(moved, killed_by="a test")
    found = mutate.survivors({"rows": [asdict(m) for m in (moved, gone, killed)]})
    assert found == {"plans/plan": [replace(mutant, why="equivalent")]}
