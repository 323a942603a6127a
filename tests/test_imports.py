"""The rooms: the pure core runs without torch, only two modules issue collectives, imports point up the list."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import layout


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def modules_of(room: str) -> list[str]:
    files = [file for file in layout.sources() if layout.room_of(file) == room]
    return ["knapformer." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for file in files]


@pytest.mark.parametrize("room", ["", *layout.PURE])
def test_pure_rooms_do_not_import_torch(room):
    modules = modules_of(room) if room else ["knapformer"]
    assert modules
    assert run(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False"


def test_what_needs_torch_loads_it_when_used():
    assert run("import sys, knapformer; knapformer.Balancer; print('torch' in sys.modules)") == "True"


def test_every_room_has_its_place_and_says_what_it_is():
    rooms = {layout.room_of(file) for file in layout.sources()}
    assert rooms - {"__init__", "__main__"} == set(layout.ORDER)
    for room in layout.ORDER:
        folder = layout.PACKAGE / room
        if folder.is_dir():
            words = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            assert len(words.splitlines()) >= 3, f"{room}/__init__.py: what lives there, and what it may import"


def test_imports_point_up_the_list():
    assert layout.upward(layout.imports()) == []


def test_an_import_that_points_down_is_seen(tmp_path):
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.py").write_text("from knapformer.balancer import Step\nimport knapformer.given.cost\n")
    found = layout.imports(tmp_path)
    assert found == {("plans", "balancer"): 1, ("plans", "given"): 1}
    assert layout.upward(found) == [("plans", "balancer")]


def test_the_map_is_made_of_the_folders():
    assert (layout.ROOT / "CONTRIBUTING.md").read_text() == layout.contributing()


COLLECTIVES = {
    "all_to_all_single",
    "all_gather",
    "all_reduce",
    "broadcast",
    "barrier",
    "all_gather_object",
    "new_group",
    "isend",
    "irecv",
    "batch_isend_irecv",
}


def collectives(tree: ast.Module) -> set[str]:
    """Calls ``dist.X(…)`` of a collective."""
    calls = (n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return {f.attr for f in calls if isinstance(f.value, ast.Name) and f.value.id == "dist"} & COLLECTIVES


def test_only_two_modules_issue_collectives():
    issuing = {file for file, tree in layout.sources().items() if collectives(tree)}
    assert issuing == {"execution/groups.py", "execution/transport.py"}
