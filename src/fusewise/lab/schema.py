"""Validates records against `record.schema.json` before any other code reads them: a record may be malformed or
hostile.

Implements the subset of JSON Schema that the file uses, so that reading a record needs no extra dependency. An unknown
keyword is a bug in the schema file.
"""

from __future__ import annotations

import functools
import json
import math
import re
from importlib import resources
from typing import Any

Json = dict[str, Any]

#: Nesting limit; our records have a dozen levels. Keeps recursive code below Python's recursion limit.
DEEPEST = 64
KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
    "integer": (int,),
}
SILENT = {"$schema", "$defs", "title", "description", "else", "then"}


@functools.cache
def schema() -> Json:
    """The JSON Schema of `record.json`."""
    text = resources.files(__package__).joinpath("record.schema.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def check(value: Any, part: str = "", fix: str = "name another file", what: str = "it") -> None:
    """ValueError, naming the location, if `value` violates the schema or its definition `part` (row)."""
    if found := fault(value, part):
        raise ValueError(f"record: {what} must follow record.schema.json, got this fault: {found}; {fix}")


def fault(value: Any, part: str = "") -> str:
    """The first violation of the schema, or of its definition `part`, prefixed by its location; "" if there is none."""
    return (_depth(value) or _fault(value, schema()["$defs"][part] if part else schema())).lstrip(".")


def loads(text: str) -> Any:
    """`json.loads` that raises ValueError for everything that is not JSON, NaN and Infinity included, and for excessive
    nesting."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _depth(value: Any) -> str:
    """The violation if the value is nested too deeply; "" if it is not."""
    layer = [value]
    for _ in range(DEEPEST):
        layer = [
            inner
            for outer in layer
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(inner, (dict, list))
        ]
        if not layer:
            return ""
    return f"must be nested no more than {DEEPEST} deep, got more"


def _fault(value: Any, rules: Json) -> str:
    """The first violation, prefixed by its location; "" if there is none."""
    for keyword, rule in rules.items():
        found = "" if keyword in SILENT else _BY_KEYWORD[keyword](value, rule, rules)
        if found:
            return found
    return ""


def _at(place: str, found: str) -> str:
    return f"{place}{'' if found.startswith(('[', '.')) else ': '}{found}" if found else ""


def short(value: Any) -> str:
    """An untrusted value in a message, whatever its size."""
    text = repr(value) if not isinstance(value, (dict, list)) else f"{type(value).__name__} of {len(value)}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _key(key: str) -> str:
    """An untrusted key, made safe for a terminal."""
    return key if re.fullmatch(r"[\w-]{1,60}", key) else short(key)


def _is(value: Any, kind: str) -> bool:
    """Whether the value has the JSON type. Numbers exclude bools and must be finite, unlike Python's reading of 1e999;
    their range is the schema's business."""
    if kind in ("number", "integer"):
        return isinstance(value, KINDS[kind]) and not isinstance(value, bool) and -math.inf < value < math.inf  # type: ignore[operator]
    return isinstance(value, KINDS[kind])


def _type(value: Any, rule: str | list[str], _: Json) -> str:
    kinds = [rule] if isinstance(rule, str) else rule
    if any(_is(value, kind) for kind in kinds):
        return ""
    words = ("a finite number" if kind == "number" else kind for kind in kinds)
    return f"must be {' or '.join(words)}, got {short(value)}"


def _enum(value: Any, rule: list[Any], _: Json) -> str:
    fits = any(type(value) is type(one) and value == one for one in rule)
    return "" if fits else f"must be one of {', '.join(map(str, rule))}, got {short(value)}"


def _properties(value: Any, rule: Json, rules: Json) -> str:
    if not isinstance(value, dict):
        return ""
    return next((_at(f".{k}", f) for k, r in rule.items() if k in value and (f := _fault(value[k], r))), "")


def _additional(value: Any, rule: Any, rules: Json) -> str:
    others = {k: v for k, v in value.items() if k not in rules.get("properties", {})} if isinstance(value, dict) else {}
    if rule is False:
        return f"must not have {short(next(iter(others)))}" if others else ""
    return next((_at(f".{_key(k)}", f) for k, v in others.items() if (f := _fault(v, rule))), "")


def _names(value: Any, rule: Json, _: Json) -> str:
    keys = value if isinstance(value, dict) else ()
    return next((_at(f".{_key(k)}", f) for k in keys if (f := _fault(k, rule))), "")


def _pattern(value: str, rule: str, _: Json) -> str:
    return "" if re.search(rule, value) else f"must match {rule}, got {short(value)}"


def _required(value: Any, rule: list[str], _: Json) -> str:
    missing = [name for name in rule if name not in value] if isinstance(value, dict) else []
    return f"must have {missing[0]}" if missing else ""


def _items(value: Any, rule: Json, _: Json) -> str:
    if not isinstance(value, list):
        return ""
    return next((_at(f"[{i}]", f) for i, v in enumerate(value) if (f := _fault(v, rule))), "")


def _length(value: Any, rule: int, rules: Json) -> str:
    low, high = rules.get("minLength") or rules.get("minItems") or 0, rules.get("maxLength", math.inf)
    if not isinstance(value, (str, list)) or low <= len(value) <= high:
        return ""
    return f"must have a length of {low} to {high}, got {len(value)}"


def _range(value: Any, rule: float, rules: Json) -> str:
    if not _is(value, "number"):
        return ""
    low, high = rules.get("minimum", -math.inf), rules.get("maximum", math.inf)
    above = rules.get("exclusiveMinimum", -math.inf)
    least = f"at least {low}" if low > above else f"above {above}"
    return "" if low <= value <= high and value > above else f"must be {least} and at most {high}, got {short(value)}"


def _reference(value: Any, rule: str, _: Json) -> str:
    return _fault(value, schema()["$defs"][rule.removeprefix("#/$defs/")])


def _if(value: Any, rule: Json, rules: Json) -> str:
    return _fault(value, rules["else" if _fault(value, rule) else "then"])


_BY_KEYWORD: dict[str, Any] = {
    "type": _type,
    "enum": _enum,
    "const": lambda value, rule, rules: _enum(value, [rule], rules),
    "properties": _properties,
    "additionalProperties": _additional,
    "propertyNames": _names,
    "pattern": _pattern,
    "required": _required,
    "items": _items,
    "minItems": _length,
    "minLength": _length,
    "maxLength": _length,
    "minimum": _range,
    "maximum": _range,
    "exclusiveMinimum": _range,
    "$ref": _reference,
    "anyOf": lambda value, rule, _: min((_fault(value, one) for one in rule), key=len),
    "allOf": lambda value, rule, _: next((found for one in rule if (found := _fault(value, one))), ""),
    "if": _if,
}
