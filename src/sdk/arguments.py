"""Checks of what users pass, before anything is begun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import index

from motet.errors import InvalidRequest
from motet.params import SamplingParams

MIN_DEADLINE = 1e-3
"""Seconds. What is shorter is a mistake: no step is."""


def check_prompt_type(prompt: object) -> None:
    """Raises InvalidRequest unless the prompt is text or looks like a sequence of token ids."""
    if isinstance(prompt, str):
        return
    if isinstance(prompt, (bytes, bytearray)):
        raise InvalidRequest("the prompt is bytes: decode it to a str first")
    is_sequence = isinstance(prompt, Sequence) or getattr(prompt, "ndim", 0) == 1  # arrays and tensors, too
    if not is_sequence:
        raise InvalidRequest(
            f"the prompt must be a str or a sequence of token ids, not {type(prompt).__name__}"
        )


def as_ids(prompt: Sequence[int]) -> list[int]:
    """The prompt's token ids as plain ints. Raises InvalidRequest."""
    try:
        return [index(token_id) for token_id in prompt]
    except TypeError as error:
        raise InvalidRequest(f"the prompt must be a str or a sequence of token ids: {error}") from None


def check_name(value: object, what: str) -> None:
    """Raises InvalidRequest unless the value is a string of Unicode characters that is not empty."""
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{what} must be a string that is not empty, not {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} {value!r} holds a lone surrogate, which is no character") from None


def check_flag(value: object, what: str) -> None:
    """Raises InvalidRequest unless the value is True or False: "no" would be as good as True."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{what} must be True or False, not {value!r}")


def check_seconds(value: object, what: str, *, least: float) -> None:
    """Raises InvalidRequest unless the value is a number of seconds, at least `least`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not least <= value <= sys.float_info.max
    ):
        raise InvalidRequest(f"{what} must be a number of seconds, at least {least:g}, not {value!r}")


def check_registry(value: object) -> None:
    """Raises InvalidRequest unless the value is a registry of prometheus-client's, or None."""
    if value is None:
        return
    from prometheus_client import CollectorRegistry  # whoever has a registry has it loaded

    if not isinstance(value, CollectorRegistry):
        raise InvalidRequest(
            f"registry must be a prometheus_client.CollectorRegistry, not {type(value).__name__}"
        )


def check_arguments(
    params: object,
    adapter: object,
    tenant: object,
    priority: object,
    deadline: object,
    request_id: object,
) -> None:
    """Raises InvalidRequest, naming the argument, what it is and what it must be."""
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params must be a SamplingParams, not {type(params).__name__}")
    if adapter is not None:
        check_name(adapter, "adapter")
    check_name(tenant, "tenant")
    if not isinstance(priority, int):
        raise InvalidRequest(f"priority must be an int, not {priority!r}")
    if deadline is not None:
        check_seconds(deadline, "deadline", least=MIN_DEADLINE)
    if request_id is not None:
        check_name(request_id, "request_id")
