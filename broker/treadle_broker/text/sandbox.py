"""The sandbox that chat templates run in.

A template comes with the model, so the operator chose it; what users write reaches it as data only. The
sandbox still keeps a template from reaching Python's internals, from changing its input, and from growing text
without bound: long operators, padding and formatting are refused.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from treadle_shared.limits import MAX_TEXT_BYTES

MAX_RENDERED: Final = 2 * MAX_TEXT_BYTES
"""Characters of a rendered chat: the largest text a request may hold, and as much again around it."""

_MAX_NUMBER: Final = 1 << 63  # no template counts further; ``**`` could otherwise fill the memory with digits
_PADDING = frozenset({"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"})
"""Methods of ``str`` whose result can be any number of times longer than their arguments."""

_PADDING_FILTERS = ("center", "format", "pprint", "urlize", "wordwrap", "xmlattr")
_MAX_INDENT: Final = 64  # columns; deeper ones are no layout
_CONCATENATE = "concatenate"


class ChatSandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment that renders chat templates as Hugging Face's ``apply_chat_template`` does.

    ``now`` is what ``strftime_now`` formats.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime.datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        del self.globals["lipsum"]
        for name in _PADDING_FILTERS:
            del self.filters[name]
        self.filters["indent"] = _indent
        self.filters["tojson"] = _to_json
        self.filters[_CONCATENATE] = _concatenate
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)

    def compile_chat(self, source: str) -> Template:
        """The template of ``source``. Raises jinja2.TemplateError where it is none."""
        return self.from_string(_BoundedConcat().visit(self.parse(source)))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuses Python's internals, and text methods that pad."""
        padding = isinstance(obj, str) and attr in _PADDING
        return not padding and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` in Jinja's own sandbox, unless the text holds a format specification, which can pad."""
        owner = getattr(value, "__self__", None)
        return None if isinstance(owner, str) and ":" in owner else super().wrap_str_format(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses results that grow out of proportion."""
        if operator == "%" and isinstance(left, str):
            raise SecurityError("a template may not format with %")
        if operator == "**" or _product_size(operator, left, right) > MAX_RENDERED:
            raise SecurityError(f"a template may not build values this large with {operator}")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and abs(result) >= _MAX_NUMBER:
            raise SecurityError("a template may not count this far")
        return result


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what the assistant wrote, for training; here it is plain."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _BoundedConcat(NodeTransformer):
    """Turns ``a ~ b`` into a filter, because the sandbox does not intercept that operator."""

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:  # noqa: N802  (jinja2's name)
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, _CONCATENATE, [], [], None, None, lineno=node.lineno)


def _product_size(operator: str, left: Any, right: Any) -> int:
    """How long ``left operator right`` becomes; 0 for plain numbers."""
    left_size, right_size = _size(left), _size(right)
    if operator == "*" and isinstance(right, int):
        return left_size * max(right, 0)
    if operator == "*" and isinstance(left, int):
        return right_size * max(left, 0)
    return left_size + right_size


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _concatenate(parts: Iterable[Any]) -> str:
    text = "".join(map(str, parts))
    if len(text) > MAX_RENDERED:
        raise SecurityError("a template may not build values this large with ~")
    return text


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    return do_indent(text, min(width, _MAX_INDENT), first, blank)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """JSON without HTML escapes, which a prompt does not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=None if indent is None else min(indent, _MAX_INDENT))


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))
