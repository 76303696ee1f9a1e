"""TemplateBudget: how much one run of a chat template may build, asked before it is built. Knows no jinja2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from types import BuiltinMethodType
from typing import Any, TypeVar

T = TypeVar("T")

MAX_BUILT = 1 << 26
"""Characters, and items at `ITEM` each, that one run may build in all. Real templates build a few times their
conversation."""

MAX_BITS = 1 << 16
"""Of an integer: nothing could interrupt the computing of a huge one."""

ITEM = 16
"""Characters that one value more counts for, beside its text."""

ESCAPED = 12
"""Most characters that one becomes inside the text of a list, in JSON or in HTML."""

LISTING_FILTERS = frozenset(
    {"batch", "groupby", "join", "list", "max", "min", "slice", "sort", "sum", "unique"}
)
"""They take every item of what they are given: a generator must be made a list to be measured."""

UNBOUNDED_FILTERS = frozenset({"pprint", "urlize", "wordwrap", "xmlattr"})
"""For web pages and for debugging; nothing tells beforehand what they build."""

_TEXT_FILTERS = frozenset(
    {
        "capitalize",
        "center",
        "e",
        "escape",
        "forceescape",
        "format",
        "indent",
        "int",
        "lower",
        "replace",
        "safe",
    }
    | {"string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount"}
)
"""They write out whatever they are given."""

_COMPARING_FILTERS = frozenset({"dictsort", "groupby", "max", "min", "sort", "unique"})

_CHOOSING = frozenset({"attr", "d", "default", "first", "get", "last", "max", "min", "random"})
"""Filters and methods whose result was there before."""

_CONTAINERS: tuple[type[Any], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_HOLDING: tuple[type[Any], ...] = (dict, *_CONTAINERS)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class TooMuch(Exception):
    """What is to be built goes beyond `MAX_BUILT`."""


class TemplateBudget:
    """What one run of a template may still build. Every method raises TooMuch where that is not enough."""

    def __init__(self, check_time: Callable[[], None]) -> None:
        """check_time: called where measuring may take long."""
        self._left = MAX_BUILT
        self._check_time = check_time

    def afford(self, size: int) -> None:
        """Before something is built whose true size is counted afterwards."""
        if size > self._left:
            raise TooMuch(f"more than {MAX_BUILT >> 20} Mi characters in all")

    def spend(self, size: int) -> None:
        self.afford(size)
        self._left -= max(0, size)

    def make(self, value: T) -> T:
        """The value, a new one, counted without what it holds."""
        self.spend(_own_weight(value))
        return value

    def keep(self, value: T) -> T:
        """The value, a new one that holds others, counted with them.

        So no list holds more than may be built, though it holds one other many times, and that yet another.
        """
        self.spend(self._weight(value))
        return value

    def write(self, value: object) -> str:
        """The value's text."""
        if not isinstance(value, str):
            self.afford_text(value)
            value = str(value)
        self.spend(len(value))
        return value

    def afford_text(self, value: object) -> None:
        """Before the value is written out."""
        self.afford(len(value) if isinstance(value, str) else ESCAPED * self._weight(value))

    def afford_joined(self, separator: str | bytes, items: Iterable[object]) -> None:
        """Before the texts of items are joined."""
        size = 0
        for item in items:
            size += (
                len(separator)
                + (len(item) if isinstance(item, str) else ESCAPED * self._weight(item))
                + ITEM // 2
            )
            self.afford(size)

    def afford_field(self, value: object, specification: str) -> None:
        """Before `str.format` writes one field."""
        self.afford_text(value)
        self.spend(sum(_numbers(specification)))

    # -- operators, calls, filters -----------------------------------------------------------------------

    def operate(self, operator: str, left: Any, right: Any, compute: Callable[[], T]) -> T:
        """What a binary operator computes. Raises OverflowError for too large an integer."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (abs(right) if operator == "**" else 1)
            if operator in ("*", "**") and bits + right.bit_length() > MAX_BITS:
                raise OverflowError(f"the result of {operator} is too large")
        elif operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(items, "__len__"):
                    size = len(items) if isinstance(items, (str, bytes)) else self._weight(items)
                    self.afford(size * times)
        elif operator == "+":
            self.afford(_own_weight(left) + _own_weight(right))
        elif operator == "%":
            self._afford_percent(left, right)
        return self.keep(compute()) if operator == "*" else self.make(compute())

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call. Raises OverflowError for too large an integer."""
        self.spend(ITEM * len(args))
        if isinstance(function, type):  # dict, namespace
            self.keep((args, kwargs))
        if not isinstance(function, BuiltinMethodType):
            return
        receiver, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(receiver, (str, bytes)):
            if name == "join":
                self.afford_joined(receiver, first)
            else:
                self.afford(_method_size(receiver, name, first, args))
        elif name == "to_bytes":
            self.afford(_number(kwargs.get("length", first)))
        elif name == "from_bytes" and len(first) > MAX_BITS // 8:
            raise OverflowError("the integer is too large")

    def called(self, function: BuiltinMethodType, result: T) -> T:
        """What that gave, of a method of Python's own."""
        if result is function.__self__ or function.__name__ in _CHOOSING:
            return result
        return self.make(result)

    def filter(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a filter is applied to `args[0]`. Raises OverflowError for too large a number."""
        value = args[0]

        def option(at: int, key: str, default: Any = None) -> Any:
            return args[at] if len(args) > at else kwargs.get(key, default)

        if name in _TEXT_FILTERS:
            self.afford_text(value)
            self._text_filter(name, str(value), option, kwargs or tuple(args[1:]))
        if name in LISTING_FILTERS and hasattr(value, "__len__"):
            self.afford(4 * ITEM * len(value))
        if name in _COMPARING_FILTERS:
            self.afford(ESCAPED * self._weight(value))
        if name == "join":
            self.afford_joined(str(option(1, "d", "")), value)
        elif name in ("batch", "slice"):
            self.spend(4 * ITEM * _number(option(1, "linecount" if name == "batch" else "slices")))
        elif name == "sum" and not isinstance(option(2, "start", 0), (int, float)):
            self.afford(len(value) * self._weight(value))
        elif name == "round" and abs(_number(option(1, "precision"))) > MAX_BITS // 4:
            raise OverflowError("round to fewer places")
        elif name == "tojson":
            self._afford_json(value, option(2, "indent"), option(3, "separators"))

    def filtered(self, name: str, value: object, result: T) -> T:
        """What that gave."""
        return result if result is value or name in _CHOOSING else self.make(result)

    def _text_filter(self, name: str, text: str, option: Callable[..., Any], values: object) -> None:
        if name == "center":
            self.afford(_number(option(1, "width", 80)))
        elif name in ("e", "escape", "forceescape", "urlencode"):
            self.afford(ESCAPED * len(text))
        elif name == "replace":
            self.afford(_replaced_size(text, str(option(1, "old")), str(option(2, "new"))))
        elif name == "indent":
            width = option(1, "width", 4)
            lines = 1 + sum(map(text.count, _LINE_ENDS))
            self.afford(len(text) + lines * (len(width) if isinstance(width, str) else _number(width)))
        elif name == "format":
            self._afford_percent(text, values)
        elif name == "int" and len(text) > MAX_BITS // 8:
            raise OverflowError("the integer is too large")

    def _afford_percent(self, left: object, right: object) -> None:
        if isinstance(left, bytes):
            left = left.decode("latin-1")
        if not isinstance(left, str) or "%" not in left:
            return
        widths = right if isinstance(right, tuple) else (right,)
        size = len(left) + sum(_numbers(left)) + sum(abs(_number(width)) for width in widths if "*" in left)
        field = len(right) if isinstance(right, str) else ESCAPED * self._weight(right)
        self.afford(size + left.count("%") * field)

    def _afford_json(self, value: object, indent: object, separators: object) -> None:
        size = self._weight(value)
        self.afford(ESCAPED * size)
        if indent is None and separators is None:
            return
        width = len(indent) if isinstance(indent, str) else _number(indent)
        between = sum(map(len, separators)) if isinstance(separators, (list, tuple)) else 2
        self.afford(ESCAPED * size + size // ITEM * (max(0, width) * _depth(value) + between))

    def _weight(self, value: object) -> int:
        """Its characters and items, and those of all that it holds; looks no further than what is left."""
        size, values = 0, [value]
        for steps in count(1):
            if not values or size > self._left:
                break
            if steps % 1024 == 0:
                self._check_time()
            value = values.pop()
            size += _own_weight(value)
            if isinstance(value, dict):
                values.extend(value)
                values.extend(value.values())
            elif isinstance(value, _CONTAINERS):
                values.extend(value)
        return size


def _own_weight(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value) + ITEM
    if isinstance(value, _HOLDING):
        return ITEM * (len(value) + 1)
    return ITEM


def _depth(value: Any) -> int:
    """How deep lists and objects are in each other."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (
            v.values() if isinstance(v, dict) else v if isinstance(v, _CONTAINERS) else () for v in level
        )
        level = [item for items in inner for item in items]
    return depth


def _number(value: object) -> int:
    """A number as a size; whoever is given something else refuses it."""
    return int(value) if isinstance(value, (int, float)) and abs(value) < float("inf") else 0


def _numbers(format: str) -> Iterable[int]:
    """Widths and precisions, among others."""
    return (int(digits[:18]) for digits in re.findall(r"[1-9][0-9]*", format))


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    return len(text) + int(text.count(old)) * len(new)


def _method_size(text: Any, name: str, first: Any, args: Sequence[Any]) -> int:
    """At most what a method of a str or bytes builds; 0 if that is little more than its own length.

    first: the first argument, given by its place or its name.
    """
    if name in ("center", "ljust", "rjust", "zfill"):
        return _number(first)
    if name == "expandtabs":
        return len(text) * max(8, _number(first))
    if name == "replace" and len(args) > 1 and type(args[0]) is type(args[1]):
        return _replaced_size(text, args[0], args[1])
    if name in ("split", "rsplit", "splitlines"):
        return (
            ITEM * int(text.count(first))
            if isinstance(first, (str, bytes)) and first
            else ITEM // 2 * len(text)
        )
    if name == "translate":  # each character may become any text
        table = (
            first.values() if isinstance(first, dict) else first if isinstance(first, (list, tuple)) else ()
        )
        return len(text) * max((len(new) for new in table if isinstance(new, str)), default=1)
    return 4 * len(text) if name in ("encode", "hex") else 0
