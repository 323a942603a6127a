"""Write the fingerprints of the installed diffusers into src/knapformer/adapters/fingerprints.py.

Run it only after tests/adapters passes with that diffusers, with the check of sources left out where it fails.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import diffusers

from knapformer.adapters import FAMILIES
from knapformer.adapters.family import fingerprint, restated_sources, source_name

TARGET = Path(__file__).parents[1] / "src/knapformer/adapters/fingerprints.py"


def main() -> None:
    found: dict[str, str] = {}
    for module in FAMILIES.values():
        for function in restated_sources(importlib.import_module(module).FAMILY):
            found[source_name(function)] = fingerprint(function)
    lines = [f'    "{name}": "{value}",' for name, value in sorted(found.items())]
    TARGET.write_text(
        '"""Sources of diffusers that the packed forwards restate. Written by scripts/fingerprint_diffusers.py."""\n\n'
        f'TESTED_VERSION = "{diffusers.__version__}"\n\nFINGERPRINTS: dict[str, str] = {{\n'
        + "\n".join(lines)
        + "\n}\n"
    )


if __name__ == "__main__":
    main()
