"""Files from outside: JSON objects, read with errors of one line that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

from knapformer.errors import ConfigurationError

MOST_BYTES = 2**28
"""Of a JSON file."""

MOST_SHOWN = 60
"""Characters of a wrong value in an error."""

Schema = TypeVar("Schema", bound="BaseModel")


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file.
        what: it is, with its article, for the error: ``"a cost file"``.

    Raises:
        ConfigurationError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(_read_text(path))
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: {what} is a JSON object, got {type(content).__name__}")
    return content


def _read_text(path: str | Path) -> str:
    """What a file or a pipe holds.

    Raises:
        ConfigurationError: more than ``MOST_BYTES``.
    """
    with Path(path).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"{path} has more than {MOST_BYTES:,} bytes: give a smaller one")
    return content.decode()


def checked_object(schema: type[Schema], content: Any, where: str) -> Schema:
    """The content of a file as its schema has it.

    Args:
        schema: of this kind of file.
        content: what JSON gave.
        where: it is from, for the error.

    Raises:
        ConfigurationError: one line, which names the first place that does not follow the schema.
    """
    from pydantic import ValidationError

    try:
        return schema.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        first = found[0]
        place = ".".join(map(str, first["loc"]))
        got = _shown(first["input"])
        got = got if len(got) <= MOST_SHOWN else got[:MOST_SHOWN] + "…"
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        what = "is missing" if first["type"] == "missing" else f"{first['msg']}, got {got}"
        raise ConfigurationError(f"{where}: {place or 'all of it'}: {what}{more}") from None


def _shown(value: Any) -> str:
    """The value, or what kind it is where it is no single one."""
    return repr(value) if isinstance(value, int | float | str | bool | None) else f"a {type(value).__name__}"
