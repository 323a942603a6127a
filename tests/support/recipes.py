"""The recipes of CONTRIBUTING.md, by the bold words that they begin with."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TEXT = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = _TEXT[_TEXT.index("## Recipes") : _TEXT.index("## Rules")]


def recipe(title: str) -> str:
    """The Python of the recipe that begins with ``**title**``."""
    text = re.split(r"\n\*\*", RECIPES.split(f"\n**{title}")[1])[0]
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return str(code)
