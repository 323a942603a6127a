"""Hostile contents of files: what is right, changed in a few places, as Hypothesis draws it."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP: Any = 0
for _ in range(150):
    DEEP = [DEEP]

EXTREMES = (
    None, True, False, -1, 0, 1, 2, 3, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400,
    -(2**63) - 1, 0.5, -0.0, 1e-320, 1e16, 1e308, 1e-9, float("nan"), float("inf"), float("-inf"),
    "", "x", "0", "1e9", "x" * 2000, "a\nb", "\x00", "\ud800", "nan", [], [[]], [0], {}, {"": 0}, {"x": None}, DEEP,
)  # fmt: skip
"""What JSON may hold in the place of any value."""

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.sampled_from(EXTREMES).map(copy.deepcopy) | st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)

CHARACTERS = st.sampled_from("0123456789-+.,:;eEgbifsnx {}[]\"'|@/\\\n\t_√٣é") | st.characters()


def places(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside JSON."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(found for key, value in inner for found in places(value, (*path, key)))]


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _edit(draw: Any, content: Any) -> Any:
    """One change: another value, a value from elsewhere, one more, one less, another key."""
    path = draw(st.sampled_from(places(content)))
    what = draw(st.sampled_from(["another", "another", "nudged", "moved", "removed", "twice", "renamed"]))
    found = _at(content, path)
    if what == "nudged" and isinstance(found, int | float):
        value: Any = found + draw(st.sampled_from([-1, 1, 0.5, -found, 7 * found]))
    elif what == "moved":
        value = copy.deepcopy(_at(content, draw(st.sampled_from(places(content)))))
    else:
        value = draw(JSON)
    if not path:
        return value
    holder, key = _at(content, path[:-1]), path[-1]
    if what == "removed":
        del holder[key]
    elif what == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(found))
    elif what == "renamed" and isinstance(holder, dict):
        holder[draw(st.text(max_size=6))] = holder.pop(key)
    else:
        holder[key] = value
    return content


@st.composite
def changed_json(draw: Any, contents: tuple[Any, ...]) -> bytes:
    """JSON of one of the contents with one to three changes, now and then also of characters."""
    content = copy.deepcopy(draw(st.sampled_from(contents)))  # what is drawn must not be changed itself
    for _ in range(draw(st.integers(1, 3))):
        content = _edit(draw, content)
    text = json.dumps(content)
    if draw(st.integers(0, 9)) == 0:
        return draw(changed_bytes((text.encode(),)))
    return text.encode()


@st.composite
def changed_text(draw: Any, texts: tuple[str, ...]) -> bytes:
    """One of the texts with one to four pieces replaced, removed or repeated."""
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 6)))
        piece = draw(
            st.text(CHARACTERS, max_size=4)
            | st.integers().map(str)
            | st.sampled_from([text[start:end] * 2, text, "9" * 13, "1e400", "nan", "-1", "0"])
        )
        text = text[:start] + piece + text[end:]
    return text.encode("utf-8", "surrogatepass")


@st.composite
def changed_bytes(draw: Any, contents: tuple[bytes, ...]) -> bytes:
    """One of the contents with one to four bytes or runs replaced, removed or repeated, or cut off."""
    content = draw(st.sampled_from(contents))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(len(content), start + 8)))
        piece = draw(st.binary(max_size=4) | st.sampled_from([b"", content[start:end] * 2, b"\xff\xfe", b"\x00"]))
        content = content[:start] + piece + (content[end:] if draw(st.integers(0, 9)) else b"")
    return content
