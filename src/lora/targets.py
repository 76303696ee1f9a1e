"""Which modules a PEFT config adapts, and each one's rank and scaling."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from motet.errors import AdapterLoadError, UnsupportedAdapter
from motet.lora.peft_config import MAX_RANK, PeftConfig
from motet.lora.refusals import listed

if TYPE_CHECKING:
    import regex

_ALL_LINEAR = "all-linear"
TIME_LIMIT = 5.0
"""Seconds for all expressions of one config: a hostile one can take for ever."""
MAX_REPEATS = 1000
"""The product of all counts in an expression, as 20 in `.{20}`: compiled, each takes that many times the memory."""
_COUNT = re.compile(r"\{\s*(\d+)")
_VERBOSE = re.compile(r"\(\?[A-Za-z0-9]*x")


@dataclass(frozen=True)
class Target:
    """One adapted module."""

    rank: int
    scaling: float


def find_targets(
    config: PeftConfig, linears: Iterable[str], others: Iterable[str], held: Iterable[str]
) -> dict[str, Target]:
    """{path: Target} of all modules that PEFT adapts for `config`.

    All paths are as the adapter's keys name them. linears: the model's projections; others: its further modules
    that can be adapted, which "all-linear" leaves out; held: the modules that the file holds weights of, which
    count where the config names none. Raises `AdapterLoadError` where the config's names or expressions fit
    nothing or make no sense, `UnsupportedAdapter` for a rank that is too high.
    """
    expressions = _Expressions(config)
    linears = list(linears)
    if config.targets is None:
        found = list(held)
    elif isinstance(config.targets, str) and config.targets.lower() == _ALL_LINEAR:
        found = [path for path in linears if not _is_excluded(config, path, expressions)]
    else:
        found = _named(config, config.targets, [*linears, *others], expressions)
    return {path: _target(config, path, expressions) for path in found}


def _named(
    config: PeftConfig, targets: str | tuple[str, ...], paths: list[str], expressions: _Expressions
) -> list[str]:
    if isinstance(targets, str):
        found = [path for path in paths if expressions.fit("target_modules", targets, path)]
    else:
        found = [path for path in paths if _ends_in(path, targets)]
        if idle := [name for name in targets if not any(_ends_in(path, (name,)) for path in paths)]:
            raise AdapterLoadError(
                f"{config.path}: target_modules names {listed(idle)}, but the model has no such module, or none "
                "that can be adapted, and the adapter no tensor for it. If this is meant, take it from the list"
            )
        if config.layers is not None:  # a whole path counts in any layer
            layers = config.layers
            found = [path for path in found if path in targets or _layer(config, path, expressions) in layers]
    return [path for path in found if not _is_excluded(config, path, expressions)]


def _ends_in(path: str, names: tuple[str, ...]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _is_excluded(config: PeftConfig, path: str, expressions: _Expressions) -> bool:
    if isinstance(config.excluded, str):
        return bool(config.excluded) and expressions.fit("exclude_modules", config.excluded, path)
    return _ends_in(path, config.excluded)


def _layer(config: PeftConfig, path: str, expressions: _Expressions) -> int | None:
    """The path's first number behind the name of a list of layers."""
    if not config.layer_lists:
        match = re.match(r".*?\.[^.]*\.(\d+)\.", path)
        return int(match[1]) if match else None
    for name in config.layer_lists:
        number = expressions.number_behind("layers_pattern", name, path)
        if number is not None:
            return number
    return None


def _target(config: PeftConfig, path: str, expressions: _Expressions) -> Target:
    rank = next(
        (r for key, r in config.rank_pattern.items() if expressions.fit_end("rank_pattern", key, path)),
        config.rank,
    )
    alpha = next(
        (x for key, x in config.alpha_pattern.items() if expressions.fit_end("alpha_pattern", key, path)),
        config.alpha,
    )
    if rank > MAX_RANK:
        raise UnsupportedAdapter(
            f"{config.path}: rank {rank} of {path}, but motet computes ranks up to {MAX_RANK}"
        )
    return Target(rank, alpha / (math.sqrt(rank) if config.rslora else rank))


class _Expressions:
    """The config's regular expressions, matched as PEFT matches them, but with a time limit.

    Python's own `re` cannot be stopped and holds up every thread meanwhile.
    """

    def __init__(self, config: PeftConfig) -> None:
        self._path = config.path
        self._deadline = time.monotonic() + TIME_LIMIT
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def fit(self, field: str, expression: str, path: str) -> bool:
        """Whether the whole path is one."""
        return self._match(field, expression, expression, path, whole=True) is not None

    def fit_end(self, field: str, expression: str, path: str) -> bool:
        """Whether the path's last names are one."""
        return self._match(field, expression, rf"(.*\.)?({expression})$", path) is not None

    def number_behind(self, field: str, expression: str, path: str) -> int | None:
        """The first number that follows a name that is one."""
        match = self._match(field, expression, rf"(?:^|.*?\.){expression}\.(?P<idx>\d+)\.", path)
        return int(match["idx"]) if match else None

    def _match(
        self, field: str, expression: str, around: str, path: str, *, whole: bool = False
    ) -> regex.Match[str] | None:
        import regex  # an engine starts without it

        try:
            if around not in self._compiled:
                self._check_size(field, expression)
                self._compiled[around] = regex.compile(around)
            compiled = self._compiled[around]
            left = max(self._deadline - time.monotonic(), 1e-3)
            return (compiled.fullmatch if whole else compiled.match)(path, timeout=left, concurrent=True)
        except regex.error as error:
            raise AdapterLoadError(
                f"{self._path}: {field}: {expression!r:.80} is no regular expression: {error}"
            ) from error
        except TimeoutError:
            raise AdapterLoadError(
                f"{self._path}: {field}: matching {expression!r:.80} takes longer than {TIME_LIMIT:g} seconds"
            ) from None

    def _check_size(self, field: str, expression: str) -> None:
        if _VERBOSE.search(expression):  # where a count can hide behind spaces and comments
            raise UnsupportedAdapter(
                f"{self._path}: {field}: {expression!r:.80} is a verbose expression, (?x)"
            )
        repeats = 1
        for count in _COUNT.findall(expression):
            repeats *= max(1, int(count[:10]))
            if repeats > MAX_REPEATS:
                raise UnsupportedAdapter(
                    f"{self._path}: {field}: {expression!r:.80} repeats more than {MAX_REPEATS} times in all"
                )
