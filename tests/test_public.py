"""What users import: names and signatures of the public places, held against ``tests/public.txt``.

After a change that is meant: ``python tests/test_public.py > tests/public.txt``.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

PLACES = ("knapformer", "knapformer.adapters", "knapformer.losses", "knapformer.parallel", "knapformer.models")
SNAPSHOT = Path(__file__).parent / "public.txt"


def public_names() -> str:
    lines = []
    for place in PLACES:
        module = importlib.import_module(place)
        for name in sorted(module.__all__):
            if name != "__version__":
                lines += _described(f"{place}.{name}", getattr(module, name))
    return "\n".join(lines) + "\n"


def _described(path: str, thing: object) -> list[str]:
    if inspect.isclass(thing):
        is_ours = thing.__module__.startswith("knapformer")
        members = {n: m for n, m in vars(thing).items() if not n.startswith("_")} if is_ours else {}
        kinds = (property, classmethod, staticmethod)
        methods = [n for n, m in members.items() if inspect.isfunction(m) or isinstance(m, kinds)]
        is_error = issubclass(thing, Exception)
        own = [path + ("" if is_error else _signature(thing))]
        return own + [f"{path}.{name}{_signature(getattr(thing, name))}" for name in sorted(methods)]
    return [path + (_signature(thing) if callable(thing) else f": {type(thing).__name__}")]


def _signature(thing: object) -> str:
    if isinstance(thing, property):
        return ""
    try:
        full = inspect.signature(thing)  # type: ignore[arg-type]  # told apart by the exception
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=p.empty) for p in full.parameters.values()]
    return str(full.replace(parameters=parameters, return_annotation=full.empty))


def test_public_names_are_those_of_the_snapshot():
    found, expected = public_names().splitlines(), SNAPSHOT.read_text().splitlines()
    assert found == expected, "if this is meant, renew tests/public.txt and say so in CHANGELOG.md"


def test_the_snapshot_sees_members_and_arguments():
    names = public_names()
    assert "knapformer.Step.restore(self, " in names and "knapformer.losses.reduce_loss(per_token_loss, *, " in names


if __name__ == "__main__":
    print(public_names(), end="")
