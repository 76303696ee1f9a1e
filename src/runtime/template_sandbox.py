"""CompiledTemplate: a chat template run through Jinja, shut in: it sees plain data, and is bounded in time and memory.

The one import of jinja2, itself imported when a model's template is first used. What templates may rely on
is what transformers gives them: its whitespace rules, loop controls, the `generation` tag, `raise_exception`,
`strftime_now` and a `tojson` that escapes nothing.

Time is looked at between steps: a single one, on data as large as a template may build, can take a second more.
Memory is bounded by counting characters and items: Python takes one to four bytes for the one, up to a hundred
for the other, so that a template that means harm can take some hundred MiB, until it is ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from motet.errors import InvalidRequest, RequestFailed
from motet.runtime.template_budget import (
    ITEM,
    LISTING_FILTERS,
    UNBOUNDED_FILTERS,
    TemplateBudget,
    TooMuch,
)

MAX_SECONDS = 2.0
"""Of computing, for one conversation: real templates take milliseconds, and other texts wait meanwhile."""

MAX_DATE_FORMAT = 1000
"""Characters: each may ask for many."""


class CompiledTemplate:
    """One template, ready to run. Not thread-safe.

    Raises InvalidRequest if the source is no Jinja template.
    """

    def __init__(self, source: str) -> None:
        self._environment = environment = _Environment()
        try:
            code = environment.compile(_Watched().visit(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the model's chat template is no Jinja template (line {error.lineno}: {error}); "
                "pass the prompt as text to `stream` instead"
            ) from error
        except Exception as error:  # too many loops in each other, too deep an expression
            raise InvalidRequest(
                f"the model's chat template cannot be compiled ({type(error).__name__}: {error}); "
                "pass the prompt as text to `stream` instead"
            ) from error
        self._template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )

    def render(self, **variables: object) -> str:
        """The template's text.

        Raises InvalidRequest if the template refuses the conversation by `raise_exception`, RequestFailed if
        it fails, does not end, or builds too much.
        """
        self._environment.new_budget()
        self._environment.stop_at = time.thread_time() + MAX_SECONDS
        try:
            return self._template.render(**variables)
        except _Refusal as error:
            raise InvalidRequest(f"the model's chat template refuses this conversation: {error}") from error
        except _TooLong:
            raise RequestFailed(
                f"the model's chat template did not end within {MAX_SECONDS:g} s of computing"
            ) from None
        except TooMuch as error:
            raise RequestFailed(
                f"the model's chat template builds too much on this conversation: {error}"
            ) from None
        except Exception as error:  # a template may raise whatever an expression can
            raise RequestFailed(
                f"the model's chat template failed on this conversation: {type(error).__name__}: {error}"
            ) from error


class _Refusal(TemplateError):
    """Raised by the template itself."""


class _TooLong(Exception):
    """The template's time is over."""


class _Watched(NodeTransformer):
    """A template's tree with calls of the environment where Jinja itself would not ask it."""

    def visit_For(self, loop: nodes.For) -> nodes.Node:
        self.generic_visit(loop)
        loop.iter = _call("__in_time", loop.iter)
        return loop

    def visit_Concat(self, concat: nodes.Concat) -> nodes.Node:
        self.generic_visit(concat)
        concat.nodes = [_call("__write", node) for node in concat.nodes]
        return concat

    def visit_Getitem(self, item: nodes.Getitem) -> nodes.Node:
        self.generic_visit(item)
        return _call("__make", item) if isinstance(item.arg, nodes.Slice) else item

    def visit_literal(self, literal: nodes.Literal) -> nodes.Node:
        self.generic_visit(literal)
        is_constant = all(isinstance(node, nodes.Const) for node in literal.iter_child_nodes())
        return (
            literal if is_constant or getattr(literal, "ctx", "load") != "load" else _call("__keep", literal)
        )

    visit_List = visit_Tuple = visit_Dict = visit_literal


def _call(method: str, node: Any) -> nodes.Filter:
    """As a filter, which Jinja calls straight away."""
    call = nodes.Filter(node, method, [], [], None, None)
    call.set_lineno(node.lineno)
    call.set_environment(node.environment)
    return call


class _Environment(ImmutableSandboxedEnvironment):
    """Every turn of a loop, every call and every filter looks at the clock and says what it may build."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        self.stop_at = float("inf")
        self.new_budget()  # constants are computed when the template is compiled
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, loopcontrols],
            finalize=self.write,
        )
        self.filters["tojson"] = _tojson
        self.filters = {
            name: self._watched(name, function)
            for name, function in self.filters.items()
            if name not in UNBOUNDED_FILTERS
        }
        self.filters |= {
            "__in_time": self.in_time,
            "__write": self.write,
            "__make": self.make,
            "__keep": self.keep,
        }
        self.globals |= {
            "raise_exception": self._raise_exception,
            "strftime_now": _strftime_now,
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]  # filler text at any length

    def new_budget(self) -> None:
        self.budget = TemplateBudget(self.check_time)

    def check_time(self) -> None:
        if time.thread_time() > self.stop_at:
            raise _TooLong

    def in_time(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def write(self, value: Any) -> str:
        return self.budget.write(value)

    def make(self, value: Any) -> Any:
        return self.budget.make(value)

    def keep(self, value: Any) -> Any:
        return self.budget.keep(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """Of the whole output, a macro's or a block's: its fixed text has not been counted yet."""
        return "".join(map(self.write, pieces))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        is_pythons = isinstance(function, BuiltinMethodType)
        if is_pythons:
            function = self.wrap_str_format(function) or function  # if it was got by the filter `attr`
            if args and isinstance(args[0], Iterator):
                args = (self._listed(args[0]), *args[1:])
        self.budget.call(function, args, kwargs)
        result = super().call(context, function, *args, **kwargs)
        return self.budget.called(function, result) if is_pythons else result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        compute = super().call_binop
        return self.budget.operate(operator, left, right, lambda: compute(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if not isinstance(value, (BuiltinMethodType, MethodType)) or super().wrap_str_format(value) is None:
            return None
        text: Any = value.__self__
        takes_mapping = value.__name__ == "format_map"
        formatter = (
            _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)
        )

        def format(*args: Any, **kwargs: Any) -> str:
            if takes_mapping:
                (kwargs,), args = args, ()
            formatted: str = type(text)(formatter.vformat(text, args, kwargs))
            return self.budget.make(formatted)

        return format

    def _listed(self, items: Iterator[Any]) -> list[Any]:
        listed = []
        for item in self.in_time(items):
            self.budget.spend(ITEM)
            listed.append(item)
        return listed

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, which Jinja may give something of its own before the value."""
        at = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def filter(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            if name in LISTING_FILTERS and isinstance(args[at], Iterator):
                args = (*args[:at], self._listed(args[at]), *args[at + 1 :])
            self.budget.filter(name, args[at:], kwargs)
            return self.budget.filtered(name, args[at], function(*args, **kwargs))

        return filter

    def _raise_exception(self, message: object) -> NoReturn:
        raise _Refusal(str(self.write(message)))


class _Formatter(SandboxedFormatter):
    """Says what each field may build."""

    def __init__(self, environment: _Environment, **options: Any) -> None:
        super().__init__(environment, **options)
        self._budget = environment.budget

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.afford_field(value, format_spec)
        return self._budget.make(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.afford_text(value)
        return super().convert_field(value, conversion)


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """For a format that is marked as HTML."""


class _Namespace(Namespace):
    """What it holds is no part of its text."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's words for training: here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _strftime_now(format: str) -> str:
    if len(format) > MAX_DATE_FORMAT:
        raise OverflowError(f"the date's format is longer than {MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
