"""CONTRIBUTING's recipes: what is added in one place is found in every other."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from result_cases import result as example

from knapformer.demo import results
from knapformer.report import page

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = CONTRIBUTING[CONTRIBUTING.index("## Recipes") : CONTRIBUTING.index("## Rules")]

MAIN = "import sys; from knapformer.cli import main; sys.exit(main(sys.argv[1:]))"


def recipe() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL)
    return code


def run(code: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("recipes") / "lengths.json"
    file.write_text(json.dumps({"lengths": [[5000], [100, 200]]}))
    return str(file)


COMMANDS = [
    (["list"], 0, "evens"),
    (["plan", "--help"], 0, "evens"),
    (["plan", "LENGTHS", "--planner", "evens"], 0, "plan evens"),
    (["plan", "LENGTHS", "--planner", "worst"], 2, "evens"),
    (["simulate", "--help"], 0, "evens"),
    (["simulate", "--workload", "LENGTHS", "--json"], 0, '"evens"'),
    (["bench", "--help"], 0, "evens"),
    (["bench", "--planners", "evens,worst"], 2, "unknown planner 'worst'; known: home"),
    (["bench-planners", "--only", "default-8", "--seeds", "0"], 0, "| evens |"),
]


@pytest.mark.parametrize(("arguments", "code", "word"), COMMANDS)
def test_a_planner_that_is_registered_is_in_every_command(lengths, arguments, code, word):
    given = [lengths if argument == "LENGTHS" else argument for argument in arguments]
    found, said = run(recipe() + MAIN, *given)
    assert found == code and word in said


def test_a_planner_that_is_not_registered_is_in_none(lengths):
    assert "evens" not in run(MAIN, "list")[1]
    assert "unknown planner 'evens'" in run(MAIN, "plan", lengths, "--planner", "evens")[1]


def test_a_planner_that_is_registered_can_be_used_by_name():
    code = recipe() + (
        "from knapformer import Balancer, make_plan\n"
        "names = [make_plan([[5000], [100]], planner='evens').planner]\n"
        "print(*names, Balancer(planner='evens').prepare([7]).plan.planner)"
    )
    assert run(code) == (0, "evens evens")


def test_a_name_is_registered_once_and_fits_a_command_line():
    assert "there is a planner 'evens' already" in run(recipe() + recipe())[1]
    assert "no spaces, colons or commas, got 'e:v'" in run(recipe().replace('"evens", summary', '"e:v", summary'))[1]


def test_a_planner_for_other_lengths_is_refused():
    wrong = recipe().replace("return even_plan(request.lengths,", "return even_plan(Lengths.from_ranks([[1], [2]]),")
    code = "from knapformer import Lengths, make_plan\n" + wrong + "make_plan([[3], [4]], planner='evens')"
    assert "gave a plan for other lengths, homes or ranks" in run(code)[1]


def test_a_column_is_in_the_terminal_and_on_the_page(monkeypatch):
    column = results.Column("answer", "the\nanswer", lambda row: "forty-two")
    for module in (results, page):
        monkeypatch.setattr(module, "COLUMNS", (*results.COLUMNS, column))
    result = example()
    table = results.results_table(result["summary"])
    assert table.columns[-1].header == "the\nanswer" and next(iter(table.columns[-1].cells)) == "forty-two"
    assert "<th>answer</th>" in page.render_page(result) and "<td>forty-two</td>" in page.render_page(result)


def test_what_the_recipes_name_is_there():
    for name in re.findall(r"`([\w/.<>]+\.(?:py|cpp|pyi))`", RECIPES):
        places = [ROOT / name, ROOT / "src/knapformer" / name]
        assert "<family>" in name or any(p.exists() for p in places), name
    for names, file in (("FAMILIES", "adapters/diffusers.py"), ("KERNELS", "execution/kernels.py")):
        assert re.search(rf"^{names}\b", (ROOT / "src/knapformer" / file).read_text(), re.MULTILINE)
