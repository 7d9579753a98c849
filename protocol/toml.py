"""Writing TOML values (reading is the standard library's)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def toml_value(value: Any) -> str:
    """A scalar, or an array of scalars on one line, as TOML; it reads back as the same value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but TOML wants DEL escaped, too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    raise TypeError(f"cannot write {type(value).__name__} as TOML")


def toml_array(values: Sequence[Any]) -> str:
    """An array of scalars or of such arrays, one a line when there are several."""
    if len(values) < 2:
        return "[" + "".join(map(toml_value, values)) + "]"
    return "[\n" + "".join(f"    {toml_value(value)},\n" for value in values) + "]"


def wrapped_comment(line: str, comment: str, column: int = 28, width: int = 120) -> str:
    """``line`` with ``comment`` behind it, or above it when there is no room."""
    if not comment:
        return line
    behind = f"{line:<{column}}  # {comment}"
    return behind if "\n" not in line and len(behind) <= width else f"# {comment}\n{line}"
