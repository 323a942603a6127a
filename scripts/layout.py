"""The package's rooms: their order, the imports between them, and the map in CONTRIBUTING.md.

    python scripts/layout.py            # counts of imports between rooms, and those that point up
    python scripts/layout.py --write    # make the map in CONTRIBUTING.md of the folders' own words

A room is a folder of ``src/knapformer``, or a module that lies beside the folders.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "knapformer"

PURE = ("version", "errors", "given", "workloads", "plans", "schedules", "predict")
"""Rooms that run without torch."""

ORDER = (
    *PURE,
    "execution",
    "streams",
    "step",
    "loops",
    "prefetch",
    "balancer",
    "models",
    "training",
    "losses",
    "parallel",
    "adapters",
    "measure",
    "demo",
    "report",
    "cli",
)
"""Data flows down: each room imports only from those before it, or from itself."""

START, END = "<!-- made by scripts/layout.py -->", "<!-- end of the map -->"


def sources(package: Path = PACKAGE) -> dict[str, ast.Module]:
    """Each module, by its path inside the package, parsed."""
    return {p.relative_to(package).as_posix(): ast.parse(p.read_text()) for p in sorted(package.rglob("*.py"))}


def room_of(file: str) -> str:
    """The room of a module, by its path inside the package."""
    return file.split("/", maxsplit=1)[0].removesuffix(".py")


def imported_modules(tree: ast.Module) -> list[str]:
    """Modules of the package that a module imports, wherever the statement stands, without ``knapformer.``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "knapformer":
            inside = (node.module or "").removeprefix("knapformer").lstrip(".")
            found += [inside] if inside else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [a.name.removeprefix("knapformer.") for a in node.names if a.name.startswith("knapformer.")]
    return found


def imports(package: Path = PACKAGE) -> Counter[tuple[str, str]]:
    """How many modules of one room import another room: {(from, to): modules}."""
    found: Counter[tuple[str, str]] = Counter()
    for file, tree in sources(package).items():
        rooms = {room_of(module.replace(".", "/")) for module in imported_modules(tree)}
        found.update((room_of(file), room) for room in rooms if room in ORDER and room != room_of(file))
    return found


def upward(found: Counter[tuple[str, str]]) -> list[tuple[str, str]]:
    """Imports of a room that comes later in ``ORDER``; ``__init__`` and ``__main__`` are doors and stand outside."""
    return [(a, b) for a, b in found if a in ORDER and ORDER.index(b) > ORDER.index(a)]


def crossings(found: Counter[tuple[str, str]]) -> int:
    """Pairs of arrows that cross when the rooms stand in one column and arrows are arcs on one side of it."""
    spans = [sorted((ORDER.index(a), ORDER.index(b))) for a, b in found if a in ORDER]
    return sum(a < c < b < d or c < a < d < b for (a, b), (c, d) in combinations(spans, 2))


def room_map() -> str:
    """The table of rooms, in order: what each folder's ``__init__``, or module, says of itself."""
    lines = ["| room | what lives there, and what it may import |", "|---|---|"]
    for room in ORDER:
        folder = PACKAGE / room
        tree = ast.parse((folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text())
        words = " ".join((ast.get_docstring(tree) or "").split())
        words = words if folder.is_dir() else words.split(". ")[0].rstrip(".") + "."
        lines.append(f"| `{room}{'/' if folder.is_dir() else ''}` | {words.replace('``', '`')} |")
    return "\n".join(lines)


def contributing() -> str:
    """CONTRIBUTING.md with the map as it should be."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    before, rest = text.split(START)
    return f"{before}{START}\n{room_map()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        (ROOT / "CONTRIBUTING.md").write_text(contributing())
    arrows = imports()
    for (importer, imported), modules in sorted(arrows.items()):
        print(f"{importer} -> {imported}: {modules}")
    print(f"{len(arrows)} arrows, {crossings(arrows)} crossings, upward: {upward(arrows) or 'none'}")
