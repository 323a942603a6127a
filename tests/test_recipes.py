"""CONTRIBUTING's recipes: what is added in one place is found in every other."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from recipes import RECIPES, ROOT, recipe
from result_cases import result as example

from knapformer.demo import results
from knapformer.given.cost import CostModel
from knapformer.given.lengths import Lengths
from knapformer.plans.registry import PlannerSpec
from knapformer.predict import planner_table, simulate_tables
from knapformer.predict.simulate import Setting, simulate
from knapformer.report import page

PLANNER = recipe("Add a planner")
WORKLOAD = recipe("Add a workload")
COMMANDS = """
import contextlib, io, json, sys
from knapformer.cli import main

answers = []
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        answers.append(main(arguments))
    answers[-1] = [answers[-1], " ".join(said.getvalue().split())]
print(json.dumps(answers))
"""


def run(code: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def answers(code: str, commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """Exit codes and outputs of commands, in one process in which ``code`` ran before."""
    exit_code, said = run(code + COMMANDS, json.dumps(commands))
    assert exit_code == 0, said
    return [(code, text) for code, text in json.loads(said)]


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("recipes") / "lengths.json"
    file.write_text(json.dumps({"lengths": [[5000], [100, 200]]}))
    return str(file)


IN_COMMANDS = [
    (["list"], 0, "evens"),
    (["plan", "--help"], 0, "evens"),
    (["plan", "LENGTHS", "--planner", "evens"], 0, "plan evens"),
    (["plan", "LENGTHS", "--planner", "worst"], 2, "evens"),
    (["simulate", "--help"], 0, "evens"),
    (["simulate", "--workload", "LENGTHS", "--json"], 0, '"evens"'),
    (["simulate", "--workload", "LENGTHS", "--planners", "home,evens", "--json"], 0, '"evens"'),
    (["simulate", "--workload", "LENGTHS", "--planners", "worst"], 2, "evens"),
    (["advise", "LENGTHS", "--ranks", "2", "--model", "wan2.1-1.3b", "--steps", "2", "--json"], 0, '"evens"'),
    (["replay", "--help"], 0, "evens"),
    (["replay", "--workload", "lowres", "--planners", "worst"], 2, "evens"),
    (["bench", "--help"], 0, "evens"),
    (["bench", "--planners", "evens,worst"], 2, "unknown planner 'worst'; known: home"),
    (["bench-planners", "--only", "default-8", "--seeds", "0"], 0, "| evens |"),
]


def test_a_planner_that_is_registered_is_in_every_command(lengths):
    commands = [[lengths if word == "LENGTHS" else word for word in words] for words, _, _ in IN_COMMANDS]
    for (words, code, word), (found, said) in zip(IN_COMMANDS, answers(PLANNER, commands), strict=True):
        assert found == code and word in said, (words, said)


WORKLOADS = [
    (["list"], 0, "twins:RANKS:LENGTH wan2.1-14b"),
    (["workload", "--help"], 0, "twins:RANKS:LENGTH"),
    (["simulate", "--help"], 0, "twins:RANKS:LENGTH"),
    (["workload", "twins:2:700"], 0, '{"lengths": [[700, 700], [700, 700]]}'),
    (["workload", "twins:2"], 2, "workload 'twins:2' is not of the form twins:RANKS:LENGTH"),
    (["workload", "twins:2:0"], 2, "workload 'twins:2:0' is not of the form twins:RANKS:LENGTH"),
    (["workload", "twins:2:3:4"], 2, "is not of the form twins:RANKS:LENGTH"),
    (["workload", "twins:999999:3"], 2, "would have 999,999 ranks, at most 65,536"),
    (["workload", "twins:2:700", "--ranks", "3"], 2, "is for 2 ranks, got 3"),
    (["workload", "triplets:2"], 2, "twins:RANKS:LENGTH"),
    (["simulate", "--workload", "twins:2:700", "--planners", "home", "--steps", "1", "--json"], 0, '"num_ranks": 2'),
]


def test_a_workload_that_is_registered_is_in_every_command():
    for (words, code, word), (found, said) in zip(
        WORKLOADS, answers(WORKLOAD, [words for words, _, _ in WORKLOADS]), strict=True
    ):
        assert found == code and word in said, (words, said)


def test_what_is_not_registered_is_in_no_command(lengths):
    known, planner, workload = answers(
        "", [["list"], ["plan", lengths, "--planner", "evens"], ["workload", "twins:2:3"]]
    )
    assert "evens" not in known[1] and "twins" not in known[1]
    assert planner[0] == 2 and "unknown planner 'evens'" in planner[1]
    assert workload[0] == 2 and "'twins:2:3' is neither a workload" in workload[1]


def test_a_planner_that_is_registered_can_be_used_by_name():
    code = PLANNER + (
        "from knapformer import Balancer, make_plan\n"
        "names = [make_plan([[5000], [100]], planner='evens').planner]\n"
        "print(*names, Balancer(planner='evens').prepare([7]).plan.planner)"
    )
    assert run(code) == (0, "evens evens")


def test_a_name_is_registered_once_and_fits_a_command_line():
    assert "there is a planner 'evens' already" in run(PLANNER + PLANNER)[1]
    assert "there is a workload 'twins' already" in run(WORKLOAD + WORKLOAD)[1]
    assert "no spaces or commas, got 'twins, RANKS:LENGTH'" in run(WORKLOAD.replace("twins:RANKS", "twins, RANKS"))[1]
    assert "unknown model 'wan9'" in run(WORKLOAD.replace("wan2.1-14b", "wan9"))[1]
    assert "no spaces, colons or commas, got 'e:v'" in run(PLANNER.replace('"evens", summary', '"e:v", summary'))[1]


def test_a_planner_for_other_lengths_is_refused():
    wrong = PLANNER.replace("return even_plan(request.lengths,", "return even_plan(Lengths.from_ranks([[1], [2]]),")
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


def test_a_column_of_simulate_is_in_the_terminal_and_in_markdown(monkeypatch):
    steps = [Lengths.from_ranks([[4000, 300], [200]])]
    rows = simulate(steps, [PlannerSpec("home"), PlannerSpec("moldable")], Setting(CostModel()))
    column = ("moved", lambda row: f"{row['moved_tokens']:,.0f} moved")
    monkeypatch.setattr(simulate_tables, "COLUMNS", (*simulate_tables.COLUMNS, column))
    moved = f"{rows['moldable']['moved_tokens']:,.0f} moved"
    assert rows["moldable"]["moved_tokens"] > 0
    assert list(simulate_tables.planner_table("t", rows).columns[-1].cells) == ["0 moved", moved]
    described = {"model": "m", "model_chosen": "as asked", "workload_model": None, "speeds": "s", "memory_of": "h"}
    described |= {"num_ranks": 2, "steps": 1, "shard_size": 1, "label": "l"}
    text = simulate_tables.markdown("t", "c", [{**described, "planners": rows, "ratios": {}, "published": None}])
    assert next(line for line in text.splitlines() if "| moldable |" in line).endswith(f"| {moved} |")


def test_a_column_of_bench_planners_is_in_its_table(monkeypatch):
    monkeypatch.setattr(planner_table, "COLUMNS", (*planner_table.COLUMNS, ("answer", lambda row: "forty-two")))
    row = planner_table.Row("joint", 32, 24, "moldable", 1.03, 1.05, 1.02, 3.0, 2.0, 1.5, 4.0)
    head, _, line = planner_table.planner_table([row]).splitlines()
    assert head.endswith("| answer |") and line.endswith("| forty-two |") and "**1.0300**" in line


def test_every_family_follows_its_recipe():
    pytest.importorskip("diffusers")
    import family_cases

    from knapformer.adapters import FAMILIES
    from knapformer.adapters.family import restated_sources, source_name
    from knapformer.adapters.fingerprints import FINGERPRINTS

    built = {type(case.build()).__name__ for case in family_cases.CASES.values()}
    folder = ROOT / "src/knapformer/adapters"
    modules = {path.stem for path in folder.glob("*.py") if "\nFAMILY = " in path.read_text()}
    assert {module.rpartition(".")[2] for module in FAMILIES.values()} == modules
    for name, module in FAMILIES.items():
        family = importlib.import_module(module).FAMILY
        assert family.model.__name__ == name and name in built
        assert {source_name(source) for source in restated_sources(family)} <= set(FINGERPRINTS)


def test_what_the_recipes_name_is_there():
    for name in re.findall(r"`([\w/.<>]+\.(?:py|cpp|pyi))`", RECIPES):
        places = [ROOT / name, ROOT / "src/knapformer" / name]
        assert "<family>" in name or any(p.exists() for p in places), name
    for names, file in (("FAMILIES", "adapters/diffusers.py"), ("KERNELS", "execution/kernels.py")):
        assert re.search(rf"^{names}\b", (ROOT / "src/knapformer" / file).read_text(), re.MULTILINE)
