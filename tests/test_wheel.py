"""A wheel is built as a release would be, from the source distribution, and plans in a new venv without a compiler.

The venv is empty but for the wheel. What the wheel declares as needed at run time is not installed a second time: the
venv sees links to exactly those packages (`supply.closure`, without extras), as they are installed here. So a package
that is used and not declared is missed; a range of versions that is too wide or cannot be had is not. Nothing is
downloaded. Building needs the C++ compiler that installing from source needs too: without one these tests fail.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import supply

ROOT = Path(__file__).parents[1]
LENGTHS = {"lengths": [[300, 9000], [200, 128, 77], [4096], [50]]}
PLANNERS = [["moldable"], ["ulysses"], ["bags", "--topology", "g2n2"]]


def run(*command: str | Path, **options) -> str:
    """What a command prints; its whole output is the error where it fails."""
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280, **options
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, by way of the source distribution: what git ignores is not in it."""
    folder = tmp_path_factory.mktemp("wheel")
    make_sdist = f"from scikit_build_core.build import build_sdist; build_sdist({str(folder)!r})"
    run(sys.executable, "-c", make_sdist, cwd=ROOT)
    (source,) = folder.glob("*.tar.gz")
    # Without pip's cache, which would give the wheel of an earlier run at the same path.
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *offline, "--wheel-dir", folder, source, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def link_dependencies(wheel: Path, folder: Path) -> None:
    """Links in a folder to all that a wheel declares as needed at run time, and to nothing else."""
    folder.mkdir()
    (metadata,) = (path for path in ZipPath(wheel).iterdir() if path.name.endswith(".dist-info"))
    declared = PathDistribution(metadata)
    needed = supply.closure(find=lambda name: declared if name == supply.PACKAGE else distribution(name))
    assert "numpy" in needed
    for name, found in needed.items():
        assert found is not None and found.files, f"{name} is not installed, or without a list of its files"
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            link = folder / top
            if not link.exists():
                link.symlink_to(found.locate_file(top))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A new venv with the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    offline = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *offline, wheel, cwd=folder)
    link_dependencies(wheel, folder / "dependencies")
    site_packages(folder).joinpath("dependencies.pth").write_text(str(folder / "dependencies"))
    return folder


def site_packages(installed: Path) -> Path:
    (found,) = installed.glob("venv/lib/python*/site-packages")
    return found


def without_compiler(installed: Path) -> dict[str, str]:
    """An environment that has the venv's programs and no others."""
    path = str(installed / "venv" / "bin")
    for compiler in ("cc", "c++", "gcc", "g++", "clang", "cmake", "ninja"):
        assert shutil.which(compiler, path=path) is None
    return {"PATH": path, "HOME": str(installed)}


def plan_of(command: list[str | Path], planner: list[str], folder: Path, env: dict[str, str]) -> dict:
    (folder / "lengths.json").write_text(json.dumps(LENGTHS))
    output = folder / "plan.json"
    output.unlink(missing_ok=True)
    run(*command, "plan", "lengths.json", "--planner", *planner, "--output", output, cwd=folder, env=env)
    return json.loads(output.read_text())


def test_the_wheel_has_every_module_the_compiled_one_and_the_licence(wheel):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    compiled = {name for name in names if name.startswith("knapformer/_core.") and name.endswith(".so")}
    files = (ROOT / "src").rglob("*")
    sources = {file.relative_to(ROOT / "src").as_posix() for file in files if file.suffix in {".py", ".pyi"}}
    sources |= {"knapformer/py.typed"}
    assert len(compiled) == 1 and names == sources | compiled
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in ZipFile(wheel).namelist())


@pytest.mark.parametrize("planner", PLANNERS, ids=" ".join)
def test_the_wheel_plans_without_a_compiler_as_the_installed_package_does(installed, tmp_path, planner):
    here = plan_of([sys.executable, "-m", "knapformer"], planner, tmp_path, dict(os.environ))
    there = plan_of([installed / "venv" / "bin" / "knapformer"], planner, tmp_path, without_compiler(installed))
    assert there == here
    assert [row["length"] for row in there["sequences"]] == [n for row in LENGTHS["lengths"] for n in row]


def test_the_wheel_runs_its_own_files(installed):
    code = "import knapformer._core, sys; print(knapformer.__file__, knapformer._core.__file__, *sys.path, sep='\\n')"
    python = installed / "venv" / "bin" / "python"
    package, core, *path = run(python, "-I", "-c", code, cwd=installed, env=without_compiler(installed)).splitlines()
    assert {Path(package).parent, Path(core).parent} == {site_packages(installed) / "knapformer"}
    assert str(installed / "dependencies") in path and not any(str(ROOT) in entry for entry in path)


IMPORT_ALL = """
import importlib, pkgutil, knapformer
for module in pkgutil.walk_packages(knapformer.__path__, "knapformer."):
    try:
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print(".".join(module.name.split(".")[:2]), error.name)
print("end")
"""


def test_every_module_needs_only_what_is_declared(installed):
    """But for families of diffusers, which an extra brings."""
    python = installed / "venv" / "bin" / "python"
    missed = run(python, "-I", "-c", IMPORT_ALL, cwd=installed, env=without_compiler(installed)).splitlines()
    assert set(missed) == {"knapformer.adapters diffusers", "end"}


@pytest.mark.parametrize("missing", ["knapformer/_core.*.so", "../../../../dependencies/numpy"])
def test_without_the_compiled_module_or_a_dependency_there_is_no_plan(installed, tmp_path, missing):
    """The comparison above is not made with files from elsewhere."""
    (file,) = site_packages(installed).glob(missing)
    hidden = file.rename(file.with_name("hidden"))
    try:
        with pytest.raises(AssertionError, match="ended with 1"):
            plan_of([installed / "venv" / "bin" / "knapformer"], ["moldable"], tmp_path, without_compiler(installed))
    finally:
        hidden.rename(file)
