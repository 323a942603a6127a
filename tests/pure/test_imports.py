"""The layers: the pure core runs without torch, only two modules issue collectives, imports point up the list."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import knapformer

PACKAGE = Path(knapformer.__file__).parent
PURE = (
    "version",
    "errors",
    "lengths",
    "topology",
    "shapes",
    "cost",
    "placement",
    "plan",
    "plan_format",
    "planners",
    "schedule",
    "attention_schedule",
    "micro_batches",
)
LAYERS = (
    *PURE,
    "devices",
    "groups",
    "routes",
    "exchange",
    "kernels",
    "attend",
    "streams",
    "balancer",
    "models",
    "losses",
    "parallel",
    "adapters",
    "bench",
    "report",
    "cli",
)
"""Each imports only from those before it, or from itself."""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in PURE)])
def test_the_pure_core_does_not_import_torch(module):
    assert run(f"import sys, knapformer{module}; print('torch' in sys.modules)") == "False"


def test_what_needs_torch_loads_it_when_used():
    assert run("import sys, knapformer; knapformer.Balancer; print('torch' in sys.modules)") == "True"


def sources() -> dict[str, ast.Module]:
    return {str(p.relative_to(PACKAGE)): ast.parse(p.read_text()) for p in sorted(PACKAGE.rglob("*.py"))}


def layer_of(file: str) -> str:
    name = file.split("/", maxsplit=1)[0].removesuffix(".py")
    return "cli" if name.startswith("cli_") else name


def imported_layers(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("knapformer."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("knapformer.")}
    return found & set(LAYERS)


def test_imports_point_up_the_list():
    for file, tree in sources().items():
        layer = layer_of(file)
        if not layer.startswith("__"):
            allowed = LAYERS[: LAYERS.index(layer) + 1]
            assert imported_layers(tree) <= set(allowed), file
    assert imported_layers(ast.parse("from knapformer.balancer import Step\nimport knapformer.plan")) == {
        "balancer",
        "plan",
    }


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
    issuing = {file for file, tree in sources().items() if collectives(tree)}
    assert issuing == {"exchange.py", "groups.py"}
