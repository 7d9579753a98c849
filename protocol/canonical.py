"""Canonical JSON (RFC 8785, the JSON Canonicalization Scheme): one value, one byte string, in every language.

Keys sorted, no blanks, UTF-8, numbers as ECMAScript writes them: 1.0 is ``1``, 0.00001 is ``0.00001``, 1e-7 is
``1e-7``. Restricted to what manifests hold: ASCII keys, integers within ±2^53, finite floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**53


def canonical_json(value: Any) -> bytes:
    """The canonical form. Raises ValueError for what has none (NaN, huge integers, other types, surrogates)."""
    pieces: list[str] = []
    _write(value, pieces)
    return "".join(pieces).encode()


def _write(value: Any, pieces: list[str]) -> None:
    if value is True or value is False:
        pieces.append("true" if value else "false")
    elif isinstance(value, str):
        # json escapes exactly what RFC 8785 does: " \ and control characters, the short forms where there are any.
        pieces.append(json.dumps(value, ensure_ascii=False))
    elif isinstance(value, int | float):
        pieces.append(number(value))
    elif isinstance(value, Mapping):
        pieces.append("{")
        for index, key in enumerate(sorted(value)):
            if not isinstance(key, str) or not key.isascii():
                raise ValueError(f"no canonical form for the key {key!r}")
            pieces.append(("," if index else "") + json.dumps(key) + ":")
            _write(value[key], pieces)
        pieces.append("}")
    elif isinstance(value, list | tuple):
        pieces.append("[")
        for index, item in enumerate(value):
            if index:
                pieces.append(",")
            _write(item, pieces)
        pieces.append("]")
    else:
        raise ValueError(f"no canonical form for {type(value).__name__}")


def number(value: int | float) -> str:
    """A number as ECMAScript's ``String(value)`` writes it: the shortest digits that read back as the same float64."""
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise ValueError(f"no canonical form for the integer {value}: beyond ±2^53")
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"no canonical form for {value}")
    if value == 0:
        return "0"
    if value < 0:
        return "-" + number(-value)
    mantissa, _, exponent = repr(value).partition("e")  # repr gives the shortest digits; only their layout differs
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    point -= len(digits) - len(digits.lstrip("0"))
    digits = digits.strip("0")
    if len(digits) <= point <= 21:
        return digits + "0" * (point - len(digits))
    if 0 < point <= 21:
        return digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return "0." + "0" * -point + digits
    tail = "." + digits[1:] if len(digits) > 1 else ""
    return f"{digits[0]}{tail}e{point - 1:+d}"
