"""Known vulnerabilities and licences of what the package depends on, as it is installed here. ``make check`` runs it.

    python scripts/supply.py    # one line for each finding; ends with 1 where one of them is an error

Vulnerabilities: ``pip-audit`` asks PyPI's advisories about every package that the package, or one of its extras, needs
on this platform. One in what users install is an error, one in what only ``dev`` needs is a note. Where the advisories
cannot be reached, or know none of the packages, as behind some mirrors, that is said and is no error.

Licences: what the metadata of the same packages states. What is neither in ``ALLOWED`` nor a reviewed exception is an
error. What a wheel bundles without stating it is not seen.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PACKAGE = "knapformer"
RUN_TIME, DEVELOPMENT = "run time", "extra dev"

FIRST_ANSWER_S, ALL_ANSWERS_S = 10.0, 120.0
"""How long pip-audit may take for one package, which tells whether there is a network, and then for all of them."""

ACCEPTED: dict[str, str] = {}
"""Vulnerabilities that were reviewed and do not concern us: their ID, and why."""

ALLOWED = {
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "MIT",
    "MIT-CMU",
    "BSD",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "0BSD",
    "PSF-2.0",
    "MPL-2.0",
    "ISC",
    "Unlicense",
    "Zlib",
    "CC0-1.0",
    "BSL-1.0",
}

SAME_AS = {
    "MIT License": "MIT",
    "BSD License": "BSD",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "PSFL": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
"""Names of licences in metadata without SPDX expressions: classifiers and free text."""

EXCEPTIONS = {
    (
        "regex",
        "Apache-2.0 AND CNRI-Python",
    ): "CNRI-Python is Python 1.6's licence, permissive and OSI-approved; diffusers needs it",
    (
        "nvidia-*",
        "*Proprietary*",
    ): "CUDA's libraries under NVIDIA's own terms; torch's builds for CUDA bring them, we ship none",
    ("cuda-*", "*NVIDIA*"): "NVIDIA's Python side of the same",
}
"""Reviewed: (name, what its metadata states), either with ``*``, and why that is fine."""

Find = Callable[[str], Distribution]
Parts = dict[str, dict[str, "Distribution | None"]]


class Finding(NamedTuple):
    """One line of the report."""

    kind: str
    """``error``, ``accepted``, ``note`` or ``not checked``. Only the first fails the check."""
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class UnreachableError(Exception):
    """The advisories could not be had: no network, or a service that fails."""


def closure(extra: str = "", find: Find = distribution) -> dict[str, Distribution | None]:
    """What the package needs on this platform, with one of its extras, by name. ``None`` is not installed."""
    found: dict[str, Distribution | None] = {}
    seen, waiting = set(), [(PACKAGE, frozenset({extra}))]
    while waiting:
        name, extras = item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        try:
            found[name] = find(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        for need in map(Requirement, find(name).requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in {"", *extras}):
                waiting.append((canonicalize_name(need.name), frozenset(need.extras)))
    if found.pop(PACKAGE) is None:
        raise SystemExit(f"{PACKAGE} is not installed here; make installs it")
    return found


def parts(find: Find = distribution) -> Parts:
    """What is needed for what: at run time, then what each extra adds, ``dev`` last."""
    found: Parts = {RUN_TIME: closure(find=find)}
    extras = [f"extra {name}" for name in find(PACKAGE).metadata.get_all("Provides-Extra") or ()]
    for part in sorted(extras, key=lambda part: (part == DEVELOPMENT, part)):
        known = {name for needed in found.values() for name in needed}
        needs = closure(part.removeprefix("extra "), find)
        found[part] = {name: needs[name] for name in sorted(needs.keys() - known)}
    return found


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression, or a name in ``SAME_AS``, lets us use a package by licences in ``ALLOWED`` alone."""
    if expression in SAME_AS:
        return True
    joined = re.sub(r"\s+WITH\s+", "_WITH_", expression)
    words = re.findall(r"[()]|[^\s()]+", joined)[::-1]

    def either() -> bool:
        value = both()
        while words and words[-1].upper() == "OR":
            words.pop()
            value = both() or value
        return value

    def both() -> bool:
        value = one()
        while words and words[-1].upper() == "AND":
            words.pop()
            value = one() and value
        return value

    def one() -> bool:
        word = words.pop()
        if word != "(":
            return word.replace("_WITH_", " WITH ") in ALLOWED
        value = either()
        return words.pop() == ")" and value

    try:
        return either() and not words
    except IndexError:  # the expression ends too early
        return False


def stated_licences(found: Distribution) -> list[str]:
    """What metadata states: the SPDX expression, else classifiers and a text of one line, which must all be allowed."""
    metadata = found.metadata
    if metadata.get("License-Expression"):
        return [metadata["License-Expression"]]
    classifiers = [c.split(" :: ") for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    text = (metadata.get("License") or "").strip()
    lines = [text] if text and "\n" not in text else []
    names = [c[-1].strip() for c in classifiers if c[-1] not in {"OSI Approved", "DFSG approved"}]
    return names + lines


def check_licences(needed: Parts) -> Iterator[Finding]:
    """Each package whose licence is unknown, excepted or, for an extra that is not installed, unread."""
    for part, packages in needed.items():
        for name, found in packages.items():
            if found is None:
                kind = "error" if part == RUN_TIME else "not checked"
                yield Finding(kind, f"{name}, needed by {part}, is not installed: its licence is not known")
                continue
            stated = stated_licences(found)
            if stated and all(map(is_allowed, stated)):
                continue
            words = ", ".join(stated)
            about = f"{name} {found.version}, needed by {part}, states the licence {words or 'nowhere'!r}"
            why = [w for (n, s), w in EXCEPTIONS.items() if fnmatchcase(name, n) and fnmatchcase(words, s)]
            yield (
                Finding("accepted", f"{about}: {why[0]}")
                if why
                else Finding("error", f"{about}; expected one in ALLOWED or a reviewed exception")
            )


def ask(pins: list[str], seconds: float) -> list[dict]:
    """What pip-audit answers about these ``name==version``, one entry for each."""
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder, "requirements.txt")
        asked.write_text("\n".join(pins))
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(asked), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", "5"]
        try:
            run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=seconds, cwd=folder)
        except subprocess.TimeoutExpired:
            raise UnreachableError(f"no answer within {seconds:g} s") from None
    if run.stdout.startswith("{"):
        return json.loads(run.stdout)["dependencies"]
    last = (run.stderr.strip().splitlines() or ["it said nothing"])[-1]
    if re.search(r"requests\.exceptions\.|ServiceError|ConnectionError|[Cc]ould not connect", run.stderr):
        raise UnreachableError(shorten(last, 120))
    raise RuntimeError(f"pip-audit ended with {run.returncode}: {last}")


def check_vulnerabilities(needed: Parts) -> Iterator[Finding]:
    """Each known vulnerability, and each package that the advisories do not know."""
    part_of = {name: part for part, packages in needed.items() for name, found in packages.items() if found}
    installed = {name: found for packages in needed.values() for name, found in packages.items() if found}
    # torch 2.13.0+cpu is 2.13.0 to the advisories.
    pins = [f"{name}=={Version(found.version).public}" for name, found in installed.items()]
    try:
        ask(pins[:1], FIRST_ANSWER_S)
        answers = ask(pins, ALL_ANSWERS_S)
    except UnreachableError as error:
        yield Finding("not checked", f"no network: vulnerabilities of {len(pins)} packages ({error})")
        return
    except RuntimeError as error:
        yield Finding("error", str(error))
        return
    unknown = [a["name"] for a in answers if "skip_reason" in a]
    if unknown:
        names = "" if len(unknown) == len(pins) else f": {', '.join(sorted(unknown))}"
        text = f"vulnerabilities of {len(unknown)} of {len(pins)} packages, unknown to the advisories{names}"
        yield Finding("not checked", text)
    for answer in answers:
        part = part_of[canonicalize_name(answer["name"])]
        for found in answer.get("vulns", ()):
            ids = [found["id"], *found.get("aliases", ())]
            fixed = ", ".join(found.get("fix_versions", ())) or "nothing yet"
            text = f"{answer['name']} {answer['version']}, needed by {part}, has {' = '.join(ids)}, fixed in {fixed}"
            why = [ACCEPTED[i] for i in ids if i in ACCEPTED]
            kind = "accepted" if why else "note" if part == DEVELOPMENT else "error"
            yield Finding(kind, f"{text}: {why[0]}" if why else text)


def main() -> int:
    """Print the findings; 1 where one is an error."""
    needed = parts()
    findings = [*check_vulnerabilities(needed), *check_licences(needed)]
    for finding in findings:
        print(finding)
    errors = sum(finding.kind == "error" for finding in findings)
    counted = sum(found is not None for packages in needed.values() for found in packages.values())
    print(f"supply: {counted} installed packages, {errors} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
