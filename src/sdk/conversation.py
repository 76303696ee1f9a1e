"""A conversation in the OpenAI chat shape, checked and made plain before a chat template sees it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from motet.errors import InvalidRequest

if TYPE_CHECKING:  # an import of motet need not pay for it
    from motet.runtime.chat_template import Chat

Message = Mapping[str, Any] | BaseModel
"""`role` and `content` (text, or a list of text parts); the assistant's may have `tool_calls`, a tool's answer a
`tool_call_id`. What else it has goes to the model's template. Pydantic models of that shape will do."""

Tool = Mapping[str, Any] | BaseModel
"""`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`."""


def as_chat(messages: Sequence[Message], tools: Sequence[Tool] | None) -> Chat:
    """Copies a conversation. Raises InvalidRequest, saying where, for what is not of the OpenAI chat shape."""
    from motet.runtime.chat_template import Chat

    try:
        plain = [_as_message(message, where) for message, where in _entries(messages, "messages")]
        given = (
            [_as_object(tool, where) for tool, where in _entries(tools, "tools")]
            if tools is not None
            else None
        )
    except RecursionError:
        raise InvalidRequest(
            "the conversation is nested too deeply, or holds itself: only JSON data can be in it"
        ) from None
    if not plain:
        raise InvalidRequest("messages is empty: give at least one message")
    return Chat(plain, given)


def _as_message(message: object, where: str) -> dict[str, Any]:
    # Clients spell out as None what they do not have; templates expect it to be absent.
    plain = {key: value for key, value in _as_object(message, where).items() if value is not None}
    if not isinstance(plain.get("role"), str):
        raise InvalidRequest(f"{where} needs a role: 'system', 'user', 'assistant' or 'tool'")
    if "content" in plain:
        _check_content(plain["content"], f"{where}.content")
    elif not plain.get("tool_calls"):
        raise InvalidRequest(f"{where} has no content")
    for call, place in _entries(plain.get("tool_calls", []), f"{where}.tool_calls"):
        _finish_tool_call(call, place)
    return plain


def _check_content(content: object, where: str) -> None:
    if isinstance(content, str):
        return
    for part, place in _entries(content, where):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise InvalidRequest(f"{place} is of type {kind!r}; only parts of type 'text' can be read")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{place} has no text")


def _finish_tool_call(call: object, where: str) -> None:
    """Checks a tool call, and makes an object of `arguments` that are JSON text: templates write them themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} needs a function with a name and arguments")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{where}.function.arguments must be a JSON object, not {arguments!r:.80}")
    function["arguments"] = arguments


def _entries(values: object, where: str) -> Iterable[tuple[Any, str]]:
    """The entries of a list, each with its place."""
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes)):
        raise InvalidRequest(f"{where} must be a list, not {type(values).__name__}")
    return [(value, f"{where}[{index}]") for index, value in enumerate(values)]


def _as_object(value: object, where: str) -> dict[str, Any]:
    plain = _as_plain(value, where)
    if not isinstance(plain, dict):
        raise InvalidRequest(f"{where} must be a mapping or a pydantic model, not {type(value).__name__}")
    return plain


def _as_plain(value: object, where: str) -> Any:
    """A copy in JSON's own types: objects' methods are nothing for a template."""
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum's member, its value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {str(key): _as_plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_as_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise InvalidRequest(
        f"{where} is of type {type(value).__name__}; only JSON data can be in a conversation"
    )
