"""Files from outside: JSON objects, read with errors of one line that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from knapformer.errors import ConfigurationError


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file.
        what: it is, with its article, for the error: ``"a cost file"``.

    Raises:
        ConfigurationError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: {what} is a JSON object, got {type(content).__name__}")
    return content
