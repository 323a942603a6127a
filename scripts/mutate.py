"""Small faults in the sources, one at a time, each run against the tests that ought to see it.

    python scripts/mutate.py --json mutation.json                       # a sample of every module below
    python scripts/mutate.py --module plans/plan --mutants 40 --seed 3
    python scripts/mutate.py --again mutation.json --json mutation.json  # only what survived, against today's tests

Faults are made in a copy of the tree in a temporary folder; the tree itself is only read. Each module has tests that
are tried first; what they let through meets the wider ones. A fault that hangs counts as killed. Nothing is changed in
annotations, docstrings, the texts of errors and ``strict=`` of zip. Not for CI: a full run takes most of an hour.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parents[1]
PACKAGE = "src/knapformer"
SCHEMA = "knapformer.mutation/1"

FAMILIES = "tests/adapters/test_families.py"
BALANCE, CALLS, EDGES, OUTPUT, PUBLISHED, WRAPPERS = (
    f"tests/adapters/test_{name}.py" for name in ("balance", "calls", "edges", "output", "published", "wrappers")
)
PADDING = [f"{FAMILIES}::test_{name}" for name in ("masked_padding_is_dropped", "keep_padding", "unbalance_and_copies")]
ROUTES, HOST_PATH, ATTEND = (f"tests/execution/test_{name}.py" for name in ("routes", "host_path", "attend"))
LAW_9 = "tests/execution/test_law9.py"
STEPS = [ATTEND, "tests/test_balancer.py", "tests/test_steps.py"]
PLANS = [f"tests/plans/test_{name}.py" for name in ("plan", "make_plan", "hostile", "caps", "micro_batches")]


def one_rank(*cases: str) -> list[str]:
    """The tests of families in one process, which cost little."""
    return [f"{FAMILIES}::test_one_rank[{case}]" for case in cases]


WAN = one_rank("wan", "wan-per-token-timesteps", "wan-image")
QWEN = one_rank("qwen-image", "qwen-image-edit", "qwen-image-layered")
HUNYUAN = one_rank("hunyuan-video", "hunyuan-video-unguided", "hunyuan-video-token-replace")
SD3 = one_rank("sd3", "sd3.5")
IN_ONE_PROCESS = [f"--deselect={BALANCE}::test_bad_input_on_one_rank_raises_on_all"]
OTHERS = [CALLS, EDGES, BALANCE, *PADDING, *IN_ONE_PROCESS]

TESTS: dict[str, tuple[list[str], list[str]]] = {
    "schedules/tokens": (["tests/schedules"], [ROUTES, *STEPS]),
    "schedules/attention": (["tests/schedules"], [ROUTES, *STEPS]),
    "execution/routes": ([ROUTES], [HOST_PATH, *STEPS]),
    "execution/exchange": (
        [ATTEND],
        ["tests/test_steps.py", "tests/execution/test_exchange_memory.py", "tests/test_law3.py", LAW_9],
    ),
    "training/losses": (
        ["tests/training/test_losses.py"],
        ["tests/test_steps.py", "tests/training/test_global_means.py"],
    ),
    "plans/plan": (
        PLANS[:3],
        [*PLANS[3:], "tests/plans/test_lanes.py", "tests/plans/test_worked_example.py", "tests/schedules"],
    ),
    "given/cost": (
        ["tests/given"],
        ["tests/measure/test_calibrate.py", "tests/predict/test_timeline.py", "tests/plans/test_planners.py"],
    ),
    "adapters/calls": ([CALLS, BALANCE, *IN_ONE_PROCESS], [EDGES, *PADDING]),
    "adapters/dispatched": (["tests/adapters/test_dispatched.py"], []),
    "adapters/diffusers": ([BALANCE, *IN_ONE_PROCESS], [EDGES, WRAPPERS, *PADDING]),
    "adapters/family": ([BALANCE, *IN_ONE_PROCESS], [EDGES, *PADDING]),
    "adapters/flux": (one_rank("flux", "flux-schnell"), OTHERS),
    "adapters/hunyuan_video": (HUNYUAN, OTHERS),
    "adapters/layers": (
        [*HUNYUAN, *one_rank("flux", "wan", "sd3", "sd3.5")],
        [*OTHERS, "tests/adapters/test_precision.py"],
    ),
    "adapters/output": ([*one_rank("flux"), OUTPUT], [*OTHERS, WRAPPERS]),
    "adapters/packing": ([*one_rank("flux", "wan"), *HUNYUAN[:1]], OTHERS),
    "adapters/published": ([PUBLISHED], [LAW_9]),
    "adapters/qwen_image": (QWEN, OTHERS),
    "adapters/routing_plan": ([PUBLISHED], []),
    "adapters/sd3": (SD3, OTHERS),
    "adapters/wan": (WAN, OTHERS),
    "adapters/wrappers": ([WRAPPERS], []),
}
"""For each module: the tests that see most faults soonest, and those for what is left."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One fault: at a line, code becomes other code.

    Attributes:
        file: below the root.
        line, column: from 1 and from 0, where the code begins; the end follows.
        operator: the kind of fault.
        code: the whole line, to find the fault again when lines have moved.
        before, after: the code, and what it becomes.
        killed_by: the test that failed, or how the run ended; "" for a survivor, None before it was run.
        why: for a survivor, why no test needs to see it.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    operator: str
    code: str
    before: str
    after: str
    killed_by: str | None = None
    seconds: float = 0.0
    why: str = ""

    @property
    def fault(self) -> tuple[str, str, str, str, int]:
        """What stays the same when lines move."""
        return (self.file, self.code, self.operator, self.after, self.column)

    def applied(self, source: bytes) -> bytes:
        """The module's source with the fault."""
        lines = source.splitlines(keepends=True)
        starts = [sum(map(len, lines[:i])) for i in (self.line - 1, self.end_line - 1)]
        return source[: starts[0] + self.column] + self.after.encode() + source[starts[1] + self.end_column :]


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """What may become of one node: (operator, the part that is replaced, what replaces it)."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", node, _unparsed(node, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            yield "arithmetic", node, f"({_unparsed(node, op=ARITHMETIC[type(op)]())})"
        case ast.BoolOp(op=op):
            yield "boolean", node, f"({_unparsed(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value)):
            yield "constant", node, str(value + 1)
            yield "constant", node, f"({value - 1})"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.comprehension(ifs=[test]):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "sign", node, f"({ast.unparse(operand)})"
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if keyword.arg not in (None, "strict"):
                    yield "keyword", node, _unparsed(node, keywords=[k for k in keywords if k is not keyword])
    if _may_go(node):
        yield "statement", node, "pass"


def _may_go(node: ast.AST) -> bool:
    """Statements without which a function still runs."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return isinstance(node, (ast.AugAssign, ast.Raise, ast.Break, ast.Continue))


def _unparsed(node: Any, **changed: Any) -> str:
    fields = {name: getattr(node, name) for name in node._fields} | changed
    return ast.unparse(ast.fix_missing_locations(type(node)(**fields)))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node in which faults are looked for: no annotations, no texts, nothing that only raises."""
    skipped = {"annotation", "returns", "decorator_list", "bases"}
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    for name, value in ast.iter_fields(node):
        if name not in skipped:
            yield from (part for part in (value if isinstance(value, list) else [value]) if isinstance(part, ast.AST))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every fault that can be made in a module, in order of its code."""
    data = source.encode()
    lines, found, left = data.splitlines(keepends=True), list[Mutant](), list[ast.AST]([ast.parse(source)])
    starts = [0, *itertools.accumulate(map(len, lines))]
    while left:
        node = left.pop()
        left += children(node)
        for operator, part, after in changes(node):
            place: Any = part
            where = (place.lineno, place.col_offset, place.end_lineno, place.end_col_offset)
            first, last = (
                starts[place.lineno - 1] + place.col_offset,
                starts[place.end_lineno - 1] + place.end_col_offset,
            )
            code = lines[place.lineno - 1].decode().strip()
            found.append(Mutant(file, *where, operator, code, data[first:last].decode(), after))
    return sorted(found, key=lambda m: (m.line, m.column, m.operator, m.after))


def sampled(module: str, count: int, seed: int, root: Path = ROOT) -> tuple[list[Mutant], int]:
    """``count`` faults of a module, the same for the same seed; and how many there are."""
    file = f"{PACKAGE}/{module}.py"
    everything = mutants_of(file, (root / file).read_text())
    chosen = random.Random(f"{seed} {module}").sample(everything, min(count, len(everything)))
    return sorted(chosen, key=lambda m: (m.line, m.column)), len(everything)


RUNNER = """
import contextlib, importlib, json, os, signal, sys, time
import pytest
for name in ("torch", "torch.distributed.fsdp", "hypothesis", "diffusers", "peft", *sys.argv[1:]):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    import diffusers
    for name in ("FluxTransformer2DModel", "WanTransformer3DModel", "QwenImageTransformer2DModel",
                 "SD3Transformer2DModel", "HunyuanVideoTransformer3DModel"):
        getattr(diffusers, name)
with contextlib.suppress(ImportError):
    from hypothesis import settings
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    settings.load_profile("mutants")
for line in sys.stdin:
    arguments, output, timeout_s = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        os._exit(code)
    deadline, status = time.monotonic() + timeout_s, None
    while status is None:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            status = "timeout"
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status == "timeout":
        os.waitpid(child, 0)
    print(json.dumps(status), flush=True)
"""
"""Runs pytest in forks of a process that has imported what is slow to import, but nothing of the package."""


class Copy:
    """A copy of the tree's files, with an environment of its own in which the package is that of the copy."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in listed.split("\n"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        native = importlib.util.find_spec("knapformer._core")
        assert native is not None and native.origin is not None
        shutil.copy2(native.origin, self.root / PACKAGE)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # A folder named in a .pth file is searched, but its own .pth files are not read: no editable install.
        others = [path for path in sys.path if path.endswith("site-packages")]
        (site / "copy.pth").write_text("\n".join([str(self.root / "src"), *others]) + "\n")
        self._output, self._stamp = folder / "output", int(time.time())
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        self._runner = subprocess.Popen(
            [folder / "venv/bin/python", "-c", RUNNER], cwd=self.root, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        assert self._runner.stdin is not None
        self._runner.stdin.close()
        self._runner.wait(timeout=60)

    def write(self, file: str, source: bytes) -> None:
        """Compiled files are told from stale ones by whole seconds: every write has a second of its own."""
        self._stamp += 1
        (self.root / file).write_bytes(source)
        os.utime(self.root / file, (self._stamp, self._stamp))

    def failure(self, tests: Sequence[str], timeout_s: float) -> str:
        """The first test that fails, or how else the run went wrong; "" where all pass."""
        assert self._runner.stdin is not None and self._runner.stdout is not None
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
        self._runner.stdin.write(json.dumps([[*options, *tests], str(self._output), timeout_s]) + "\n")
        self._runner.stdin.flush()
        status = json.loads(self._runner.stdout.readline())
        if status == "timeout":
            return f"timeout after {timeout_s:.0f} s"
        named = [line for line in self._output.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return "" if status == 0 else named[0].split(" - ")[0] if named else f"pytest ended with {status}"

    def last_output(self) -> str:
        return self._output.read_text()


class Stage:
    """Tests that must pass without a fault; looked at when they are first needed."""

    def __init__(self, copy: Copy, tests: Sequence[str]) -> None:
        self.tests = [test for test in tests if test.startswith("-") or (copy.root / test.split("::")[0]).exists()]
        self._copy, self._timeout_s = copy, 0.0

    def failure(self, mutant: Mutant, source: bytes) -> str:
        """What the fault breaks; "" where nothing."""
        if not self.tests:
            return ""
        if not self._timeout_s:
            began = time.monotonic()
            if failed := self._copy.failure(self.tests, 1200):
                raise SystemExit(f"without a fault, {failed}\n{self._copy.last_output()}")
            self._timeout_s = 60 + 5 * (time.monotonic() - began)
        try:
            self._copy.write(mutant.file, mutant.applied(source))
            return self._copy.failure(self.tests, self._timeout_s)
        finally:
            self._copy.write(mutant.file, source)


def run(copy: Copy, module: str, chosen: Sequence[Mutant], report: Callable[[Mutant], None]) -> list[Mutant]:
    """Each fault against the module's tests: the first ones, and the wider ones if those see nothing."""
    stages, done = [Stage(copy, tests) for tests in TESTS[module]], []
    for mutant in chosen:
        source, began = (copy.root / mutant.file).read_bytes(), time.monotonic()
        killed_by = next((failed for stage in stages if (failed := stage.failure(mutant, source))), "")
        done.append(replace(mutant, killed_by=killed_by, seconds=round(time.monotonic() - began, 1)))
        report(done[-1])
    return done


def show(mutant: Mutant) -> None:
    change = f"{mutant.operator}: {mutant.before[:60]!r} -> {mutant.after[:60]!r}"
    print(f"{mutant.killed_by or 'SURVIVED'}  {mutant.file}:{mutant.line} {change}", flush=True)


def as_json(rows: Sequence[Mutant], possible: dict[str, int], command: str, seconds: float) -> dict[str, Any]:
    """The result: a summary, and every fault."""
    modules = {}
    for module, number in possible.items():
        own = [m for m in rows if m.file == f"{PACKAGE}/{module}.py"]
        modules[module] = {"possible": number, "run": len(own), "survived": sum(m.killed_by == "" for m in own)}
    versions = {"Python": platform.python_version(), "torch": version("torch"), "diffusers": version("diffusers")}
    return {
        "schema": SCHEMA,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()} CPU, gloo",
        "versions": versions,
        "seconds": round(seconds),
        "run": len(rows),
        "survived": sum(m.killed_by == "" for m in rows),
        "modules": modules,
        "rows": [asdict(m) for m in rows],
    }


def survivors(content: dict[str, Any]) -> dict[str, list[Mutant]]:
    """Of an earlier result, by module, at the lines where their code stands today; without those that are gone."""
    found: dict[str, list[Mutant]] = {}
    for row in (Mutant(**row) for row in content["rows"] if row["killed_by"] == ""):
        today = {m.fault: m for m in mutants_of(row.file, (ROOT / row.file).read_text())}
        if row.fault in today:
            module = row.file.removeprefix(f"{PACKAGE}/").removesuffix(".py")
            found.setdefault(module, []).append(replace(today[row.fault], why=row.why))
    return found


def main(
    module: Annotated[list[str] | None, typer.Option(help="Modules, like plans/plan; by default all.")] = None,
    mutants: Annotated[int, typer.Option(help="Faults in each module.")] = 10,
    seed: Annotated[int, typer.Option(help="Which faults are drawn.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    again: Annotated[Path | None, typer.Option(help="Run the survivors of this result once more.")] = None,
) -> None:
    """Seeded faults against the tests."""
    names, began = module or list(TESTS), time.monotonic()
    earlier = json.loads(again.read_text()) if again else None
    possible = {name: sampled(name, 0, seed)[1] for name in names}
    chosen = survivors(earlier) if earlier else {name: sampled(name, mutants, seed)[0] for name in names}
    command = f"python scripts/mutate.py --mutants {mutants} --seed {seed}" + "".join(
        f" --module {m}" for m in module or []
    )
    rows: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for name in names:
            if chosen.get(name):
                rows += run(copy, name, chosen[name], show)
                if json_file and not earlier:
                    write(json_file, as_json(rows, possible, command, time.monotonic() - began))
        copy.close()
    if earlier:
        anew = {m.fault: m for m in rows}
        old = [Mutant(**row) for row in earlier["rows"]]
        rows, possible = [anew.get(m.fault, m) for m in old], {n: m["possible"] for n, m in earlier["modules"].items()}
        command, began = earlier["command"], began - earlier["seconds"]
    content = as_json(rows, possible, command, time.monotonic() - began)
    if json_file:
        write(json_file, content)
    print(f"{content['run']} faults, {content['survived']} survived, {content['seconds']} s")


def write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
