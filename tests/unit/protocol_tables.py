"""The field tables of docs/protocol.md, from the message types themselves.

Run as a script to write the tables of the page anew: ``python tests/unit/protocol_tables.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import EnumType
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
import wire_samples

from treadle_shared.telemetry import SchedulerTelemetry

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

PLAIN = {int: "int", float: "float", bool: "bool", str: "str", bytes: "bin", Any: "any value", type(None): "nil"}
_BLOCK = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def structs() -> dict[str, type[msgspec.Struct]]:
    """Every type that is part of a message, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    waiting: list[type[msgspec.Struct]] = [*wire_samples.message_types(), SchedulerTelemetry]
    while waiting:
        struct = waiting.pop()
        if struct.__name__ not in found:
            found[struct.__name__] = struct
            waiting += [inner for hint in hints(struct).values() for inner in _structs_in(hint)]
    return found


def hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """A struct's field types with their bounds, by name on the wire."""
    return get_type_hints(struct, include_extras=True)


def table(struct: type[msgspec.Struct]) -> str:
    """A struct's fields as a Markdown table: name, type with bounds, default."""
    positional = struct.__struct_config__.array_like
    lines = ["| place | field | type | default |" if positional else "| field | type | default |"]
    lines.append("|---|---|---|---|" if positional else "|---|---|---|")
    types = hints(struct)
    if struct.__struct_config__.tag is not None:
        lines.append(f'| `type` | str, `"{wire_samples.tag_of(struct)}"` | required |')
    for place, field in enumerate(msgspec.structs.fields(struct)):
        cells = [f"`{field.name}`", describe(types[field.name]), _default(field)]
        lines.append("| " + " | ".join([str(place), *cells] if positional else cells) + " |")
    return "\n".join(lines) + "\n"


def describe(hint: Any, metas: tuple[msgspec.Meta, ...] = ()) -> str:
    """A type and its bounds in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return describe(arguments[0], (*metas, *(meta for meta in arguments[1:] if isinstance(meta, msgspec.Meta))))
    if origin in (Union, UnionType):
        return " or ".join(sorted(map(describe, arguments), key=lambda words: words != "nil"))
    return _plain(hint, origin, arguments) + "".join(_bounds(hint, meta) for meta in metas)


def _plain(hint: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is list:
        return f"array of {_inner(arguments[0])}"
    if origin is tuple:
        return "[" + ", ".join(map(_inner, arguments)) + "]"
    if origin is dict:
        return f"map of {_inner(arguments[0])} to {_inner(arguments[1])}"
    if isinstance(hint, EnumType):
        return f"str, one of [{hint.__name__}](#{hint.__name__.lower()})"
    return PLAIN.get(hint) or f"[{hint.__name__}](#{hint.__name__.lower()})"


def _inner(hint: Any) -> str:
    """A type inside another; its own bounds are set apart."""
    words = describe(hint)
    return f"({words})" if ", " in words and not words.startswith("[") else words


def _bounds(hint: Any, meta: msgspec.Meta) -> str:
    unit = "bytes" if hint is bytes else "characters" if hint is str else "entries"
    lengths = (meta.min_length, meta.max_length)
    if lengths != (None, None):
        if meta.min_length == meta.max_length:
            return f", {meta.min_length} {unit}"
        words = [f"at least {lengths[0]}" if lengths[0] else "", f"at most {lengths[1]:,}" if lengths[1] else ""]
        return f", {' and '.join(filter(None, words))} {unit}"
    words = [f"{sign} {_number(value)}" for sign, value in _limits(meta) if value is not None]
    return ", " + " and ".join(words) if words else ""


def _limits(meta: msgspec.Meta) -> tuple[tuple[str, Any], ...]:
    return ("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt)


def _number(value: float) -> str:
    """Large powers of two as such."""
    whole = int(value)
    if abs(whole) >= 1 << 31 and abs(whole) & (abs(whole) - 1) == 0:
        return f"{'-' if whole < 0 else ''}2^{abs(whole).bit_length() - 1}"
    if whole == (1 << 32) - 1:
        return "2^32 - 1"
    return f"{value:,}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int | float) or value else "empty"


def _structs_in(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        if not isinstance(argument, msgspec.Meta):
            yield from _structs_in(argument)


def tables_in(page: str) -> dict[str, str]:
    """The tables that a page holds, by type name."""
    return {match[2]: match[0].removeprefix(match[1]).removesuffix(match[3]) for match in _BLOCK.finditer(page)}


def rewritten(page: str) -> str:
    """The page with every table as the types say."""
    known = structs()
    return _BLOCK.sub(lambda match: match[1] + table(known[match[2]]) + match[3], page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
