"""CompiledTemplate: a chat template run through Jinja, shut in: it sees plain data, and ends in time.

The one import of jinja2, itself imported when a model's template is first used. What templates may rely on
is what transformers gives them: its whitespace rules, loop controls, the `generation` tag, `raise_exception`,
`strftime_now` and a `tojson` that escapes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from motet.errors import InvalidRequest, RequestFailed

MAX_SECONDS = 2.0
"""Of computing, for one conversation: real templates take milliseconds, and other texts wait meanwhile."""

MAX_PRODUCT = 1 << 20
"""Largest result of `*` and `**`, in items or bits: nothing could interrupt a huge one."""


class CompiledTemplate:
    """One template, ready to run. Not thread-safe.

    Raises InvalidRequest if the source is no Jinja template.
    """

    def __init__(self, source: str) -> None:
        self._environment = environment = _Environment()
        try:
            tree = environment.parse(source)
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = nodes.Call(nodes.EnvironmentAttribute("in_time"), [loop.iter], [], None, None)
                loop.iter.set_lineno(loop.lineno)
                loop.iter.set_environment(environment)
            code = environment.compile(tree)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the model's chat template is no Jinja template (line {error.lineno}: {error}); "
                "pass the prompt as text to `stream` instead"
            ) from error
        self._template = environment.template_class.from_code(
            environment, code, environment.make_globals(None)
        )

    def render(self, **variables: object) -> str:
        """The template's text.

        Raises InvalidRequest if the template refuses the conversation by `raise_exception`, RequestFailed if
        it fails or does not end.
        """
        self._environment.stop_at = time.thread_time() + MAX_SECONDS
        try:
            return self._template.render(**variables)
        except _Refusal as error:
            raise InvalidRequest(f"the model's chat template refuses this conversation: {error}") from error
        except _TooLong:
            raise RequestFailed(
                f"the model's chat template did not end within {MAX_SECONDS:g} s of computing"
            ) from None
        except Exception as error:  # a template may raise whatever an expression can
            raise RequestFailed(
                f"the model's chat template failed on this conversation: {type(error).__name__}: {error}"
            ) from error


class _Refusal(TemplateError):
    """Raised by the template itself."""


class _TooLong(Exception):
    """The template's time is over."""


class _Environment(ImmutableSandboxedEnvironment):
    """Every turn of a loop and every call looks at the clock, so that no template runs on and on."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.stop_at = float("inf")
        self.filters["tojson"] = _tojson
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]  # filler text at any length

    def check_time(self) -> None:
        if time.thread_time() > self.stop_at:
            raise _TooLong

    def in_time(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check_time()
            yield item

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        powers = isinstance(left, int) and isinstance(right, int)
        size = _size(left) * abs(right) if operator == "**" and powers else _size(left) + _size(right)
        for items, times in ((left, right), (right, left)):
            if operator == "*" and hasattr(items, "__len__") and isinstance(times, int):
                size = len(items) * times
        if size > MAX_PRODUCT:
            raise OverflowError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _size(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 1


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's words for training: here it only groups them."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own type)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
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
