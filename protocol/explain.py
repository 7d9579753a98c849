"""What is wrong with a table, in words a user can act on: expected, found, nearest known key."""

from __future__ import annotations

import datetime
import difflib
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

MAX_PROBLEMS = 20
_KINDS: list[tuple[type | tuple[type, ...], str]] = [
    (bool, "a boolean"),
    (str, "a string"),
    (int, "an integer"),
    (float, "a number"),
    ((datetime.datetime, datetime.date, datetime.time), "a date or time"),
    (Mapping, "a table"),
    ((list, tuple), "an array"),
]
_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "string": "a string",
    "bool": "a boolean",
    "tuple": "an array",
    "list": "an array",
    "model": "a table",
    "dict": "a table",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """All problems of a pydantic error about ``model`` in one line.

    where: the table's place, put in front of each key: ``explain(error, ModelConfig, "model")`` gives
    ``model.widht: unknown key; did you mean 'width'?``
    """
    problems = []
    for item in error.errors(include_url=False):
        location = item["loc"]
        path = _path(where, location)
        text = _problem(item, model)
        problems.append(f"{path}: {text}" if path else text)
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more"]
    return "; ".join(problems)


def shown(value: Any) -> str:
    """A value as an error message shows it: short, on one line, with its kind."""
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, list | tuple):
        return f"an array of {len(value)}"
    if isinstance(value, bool):
        return f"{str(value).lower()} (a boolean)"
    return f"{_brief(value)} ({_kind(value)})"


def _brief(value: Any) -> str:
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like ``word``."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.0)
    return matches[0] if matches else None


def _path(where: str, location: Sequence[str | int]) -> str:
    path = where
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            step = step if step.isprintable() and step else ascii(step)
            path = f"{path}.{step}" if path else step
    return path if len(path) <= 200 else path[:199] + "…"


def _kind(value: Any) -> str:
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    return type(value).__name__


def _problem(item: Any, model: type[BaseModel]) -> str:
    kind, value, context = item["type"], item["input"], item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(item["loc"], model, isinstance(value, Mapping))
    if kind == "missing":
        field = _field(model, item["loc"])
        return f"missing; expected {_expected(field)}" if field is not None else "missing"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        field = _field(model, item["loc"])
        known = [option for option in _options(field) if isinstance(option, str)]
        near = nearest(value, known) if isinstance(value, str) else None
        return f"expected {context['expected']}, found {shown(value)}" + (f"; did you mean {near!r}?" if near else "")
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"expected {words} {context[key]}, found {_brief(value)}"
    if kind == "finite_number":
        return f"expected a finite number, found {_brief(value)}"
    if kind == "string_too_long":
        return f"expected at most {context['max_length']} characters, found {len(value)}"
    if kind == "string_too_short":
        return f"expected at least {context['min_length']} characters, found {len(value)}"
    if kind == "string_pattern_mismatch":
        pattern = context["pattern"]
        return f"expected {_PATTERNS.get(pattern, 'text of the form ' + pattern)}, found {shown(value)}"
    if kind in ("too_long", "too_short"):
        bound = f"at most {context['max_length']}" if kind == "too_long" else f"at least {context['min_length']}"
        return f"expected {bound} items, found {context['actual_length']}"
    if kind == "int_from_float":
        return f"expected an integer, found {shown(value)}"
    family = kind.split("_")[0]
    if family in _EXPECTED and kind.endswith(("_type", "_parsing", "_size")):
        return f"expected {_EXPECTED[family]}, found {shown(value)}"
    return f"{item['msg']}, found {shown(value)}"


_PATTERNS = {
    r"^[0-9a-f]{64}$": "64 lower-case hex digits",
    r"^([0-9a-f]{64,256})?$": "a signature in lower-case hex digits, or nothing",
}


def _unknown(location: Sequence[str | int], model: type[BaseModel], table: bool) -> str:
    key = str(location[-1])
    owner = _model_at(model, location[:-1]) or model
    if not table:
        for name, field in model.model_fields.items():
            section = _model_of(field.annotation)
            if section is not None and section is not owner and key in section.model_fields:
                return f"unknown key here; it belongs in [{name}]"
        if owner is not model and key in model.model_fields:
            return "unknown key here; it belongs at the top, before the first table"
    near = nearest(key, owner.model_fields)
    return "unknown key" + (f"; did you mean {near!r}?" if near else "")


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for step in location:
        field = found.model_fields.get(str(step)) if found is not None else None
        found = _model_of(field.annotation) if field is not None else None
    return found


def _field(model: type[BaseModel], location: Sequence[str | int]) -> Any:
    owner = _model_at(model, location[:-1])
    field = owner.model_fields.get(str(location[-1])) if owner is not None and location else None
    return field.annotation if field is not None else None


def _model_of(annotation: Any) -> type[BaseModel] | None:
    annotation = _plain(annotation)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _plain(annotation: Any) -> Any:
    """The annotation without Annotated and ``| None``."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [choice for choice in get_args(annotation) if choice is not type(None)]
        return _plain(rest[0]) if len(rest) == 1 else annotation
    return annotation


def _options(annotation: Any) -> tuple[Any, ...]:
    annotation = _plain(annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _expected(annotation: Any) -> str:
    options = _options(annotation)
    if options:
        return " or ".join(repr(option) for option in options)
    plain = _plain(annotation)
    origin = typing.get_origin(plain) or plain
    if origin in (tuple, list):
        return "an array"
    if isinstance(origin, type) and issubclass(origin, (BaseModel, dict)):
        return "a table"
    return {int: "an integer", float: "a number", str: "a string", bool: "a boolean"}.get(origin, "a value")
