"""The supply check: a vulnerability and an unknown licence fail it, a missing network does not, and is said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
import supply


class Fake(Distribution):
    """A distribution that is only its metadata."""

    def __init__(self, name: str, *lines: str) -> None:
        self.text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", "Version: 1.0+cpu", *lines, "", ""])

    def read_text(self, filename: str) -> str | None:
        return self.text if filename == "METADATA" else None

    def locate_file(self, path: str) -> Path:
        raise AssertionError(path)


def find_in(*fakes: Fake):
    """As ``importlib.metadata.distribution``, among these, with a knapformer that needs the first and an extra."""
    needs = [
        "Requires-Dist: one",
        'Requires-Dist: knapformer[more]; extra == "dev"',
        'Requires-Dist: tool; extra == "dev"',
    ]
    needs += ['Requires-Dist: absent; extra == "more"', 'Requires-Dist: nowhere; sys_platform == "none"']
    package = Fake("knapformer", *needs, "Provides-Extra: dev", "Provides-Extra: more")
    known = {fake.metadata["Name"]: fake for fake in (package, *fakes)}

    def find(name: str) -> Distribution:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    return find


ONE = Fake("one", "License-Expression: MIT", "Requires-Dist: Two[deep]>=1")
TWO = Fake("two", "License: Apache 2.0", 'Requires-Dist: three; extra == "deep"', "Requires-Dist: one")
THREE = Fake("three", "Classifier: License :: OSI Approved :: BSD License", "License: Copyright …\n        many lines")
TOOL = Fake("tool", "License-Expression: MPL-2.0 AND (GPL-3.0-only OR MIT)")
GOOD = (ONE, TWO, THREE, TOOL)


def test_what_is_needed_follows_requirements_extras_and_markers():
    found = supply.parts(find_in(*GOOD))
    assert {part: set(packages) for part, packages in found.items()} == {
        "run time": {"one", "two", "three"},
        "extra more": {"absent"},
        "extra dev": {"tool"},
    }
    assert list(supply.check_licences(found)) == [
        ("not checked", "absent, needed by extra more, is not installed: its licence is not known")
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ["License-Expression: GPL-3.0-only"],
        ["License-Expression: MIT AND GPL-2.0-or-later"],
        ["License-Expression: MIT OR"],
        ["License: MIT", "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)"],
        ["License: see LICENSE.txt"],
        ["Classifier: License :: OSI Approved"],
        [],
    ],
)
def test_a_licence_that_is_not_allowed_or_not_stated_is_an_error(lines):
    found = supply.parts(find_in(ONE, TWO, Fake("three", *lines), TOOL))
    kinds = {finding.text.split()[0].strip(","): finding.kind for finding in supply.check_licences(found)}
    assert kinds == {"three": "error", "absent": "not checked"}


def test_a_run_time_package_that_is_not_installed_is_an_error():
    (first, _) = supply.check_licences(supply.parts(find_in(ONE, TWO, TOOL)))
    assert first == ("error", "three, needed by run time, is not installed: its licence is not known")


def test_an_exception_holds_for_the_licence_that_was_reviewed(monkeypatch):
    monkeypatch.setattr(supply, "EXCEPTIONS", {("thr*", "Odd-1.0"): "read it"})
    for licence, kind in (("Odd-1.0", "accepted"), ("Odd-2.0", "error")):
        fake = Fake("three", f"License-Expression: {licence}")
        assert next(supply.check_licences(supply.parts(find_in(ONE, TWO, fake, TOOL)))).kind == kind


def fake_audit(folder: Path, vulnerable: str = "", skipped: str = "") -> None:
    """A pip_audit for ``PYTHONPATH`` that answers with one vulnerability and leaves one package out."""
    (folder / "pip_audit").mkdir()
    (folder / "pip_audit" / "__init__.py").touch()
    (folder / "pip_audit" / "__main__.py").write_text(
        "import json, sys\n"
        "lines = open(sys.argv[sys.argv.index('--requirement') + 1]).read().split()\n"
        "entries = [dict(zip(('name', 'version'), line.split('=='))) for line in lines]\n"
        f"bad, unknown = {vulnerable!r}, {skipped!r}\n"
        "found = {'id': 'PYSEC-1', 'aliases': ['CVE-1'], 'fix_versions': ['9'], 'description': 'd'}\n"
        "for e in entries:\n"
        "    e['vulns'] = [found] if e['name'] == bad else []\n"
        "    if unknown in (e['name'], 'all'):\n"
        "        e.pop('version'), e.pop('vulns'), e.update(skip_reason='not found')\n"
        "print(json.dumps({'dependencies': entries, 'fixes': []}))\n"
        "sys.exit(1 if bad else 0)\n"
    )


def run_script(folder: Path, **environment: str) -> tuple[int, list[str]]:
    """The script's exit code and lines about vulnerabilities, on what is really installed."""
    env = {**os.environ, "PYTHONPATH": str(folder), **environment}
    run = subprocess.run(
        [sys.executable, supply.__file__], check=False, env=env, capture_output=True, text=True, timeout=60
    )
    assert run.stderr == ""
    return run.returncode, [line for line in run.stdout.splitlines() if "licence" not in line]


@pytest.mark.parametrize(
    ("package", "code", "kind"), [("numpy", 1, "error"), ("pillow", 1, "error"), ("ruff", 0, "note")]
)
def test_a_vulnerability_fails_the_check_where_users_install_the_package(tmp_path, package, code, kind):
    fake_audit(tmp_path, vulnerable=package, skipped="torch")
    found, (unknown, vulnerability, total) = run_script(tmp_path)
    assert found == code and f"{code} errors" in total
    assert unknown.startswith("not checked: vulnerabilities of 1 of ") and unknown.endswith("advisories: torch")
    assert vulnerability.startswith(f"{kind}: {package} ")
    assert vulnerability.endswith("has PYSEC-1 = CVE-1, fixed in 9")


def test_an_accepted_vulnerability_passes(tmp_path, monkeypatch):
    fake_audit(tmp_path, vulnerable="one")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(supply, "ACCEPTED", {"CVE-1": "we never call it"})
    (finding,) = supply.check_vulnerabilities(supply.parts(find_in(*GOOD)))
    assert finding.kind == "accepted" and finding.text.endswith("fixed in 9: we never call it")


def test_advisories_that_know_nothing_are_not_a_clean_bill(tmp_path):
    fake_audit(tmp_path, skipped="all")
    code, (unknown, _) = run_script(tmp_path)
    count = unknown.split(" of ")[1]
    assert (
        code == 0
        and unknown == f"not checked: vulnerabilities of {count} of {count} packages, unknown to the advisories"
    )


def test_versions_are_asked_for_without_their_local_part(monkeypatch):
    asked = []
    monkeypatch.setattr(supply, "ask", lambda pins, seconds: asked.append(pins) or [])
    assert list(supply.check_vulnerabilities(supply.parts(find_in(*GOOD)))) == []
    assert sorted(asked[-1]) == ["one==1.0", "three==1.0", "tool==1.0", "two==1.0"]


def test_no_network_is_said_and_passes(tmp_path):
    """With the real pip-audit, behind a proxy that is not there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
        code, (line, _) = run_script(tmp_path, HTTPS_PROXY=nobody, https_proxy=nobody, XDG_CACHE_HOME=str(tmp_path))
    assert code == 0 and line.startswith("not checked: no network: vulnerabilities of ")


def test_a_network_that_never_answers_is_given_up(tmp_path, monkeypatch):
    """With the real pip-audit, behind a proxy that accepts and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("https_proxy", os.environ["HTTPS_PROXY"])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(supply.UnreachableError, match=r"no answer within 1.5 s"):
            supply.ask(["one==1.0"], 1.5)


def test_a_pip_audit_that_cannot_run_is_an_error_and_no_missing_network(tmp_path):
    (tmp_path / "pip_audit.py").write_text("raise ImportError('half installed')")
    code, (line, _) = run_script(tmp_path)
    assert code == 1 and line == "error: pip-audit ended with 1: ImportError: half installed"


def test_licences_of_what_is_installed_are_allowed():
    errors = [finding for finding in supply.check_licences(supply.parts()) if finding.kind == "error"]
    assert errors == []


def test_answers_are_those_of_pip_audit(tmp_path, monkeypatch):
    """The fake answers above have pip-audit's own form: its formatter writes what ``check_vulnerabilities`` reads."""
    from packaging.version import Version
    from pip_audit._format.json import JsonFormat
    from pip_audit._service.interface import ResolvedDependency, SkippedDependency, VulnerabilityResult

    bad = VulnerabilityResult("PYSEC-1", "d", [Version("9")], {"CVE-1"})
    text = JsonFormat(False, True).format(
        {ResolvedDependency("one", Version("1.0")): [bad], SkippedDependency("two", "not found"): []}, []
    )
    monkeypatch.setattr(supply, "ask", lambda pins, seconds: json.loads(text)["dependencies"])
    assert [finding.kind for finding in supply.check_vulnerabilities(supply.parts(find_in(*GOOD)))] == [
        "not checked",
        "error",
    ]
