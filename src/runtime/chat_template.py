"""ChatTemplate: a conversation as the text that the model was trained on, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.errors import CorruptCheckpoint, InvalidRequest, RequestFailed

if TYPE_CHECKING:  # jinja2 is behind it
    from motet.runtime.template_sandbox import CompiledTemplate

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names by which a model that has several templates tells which one is for what."""

_GGUF = "tokenizer.chat_template"
_GGUF_TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""GGUF's words for special tokens, and transformers'."""

_PROBE = "7f3a"


@dataclass(frozen=True)
class Chat:
    """A conversation to be continued, in plain JSON data of the OpenAI chat shape."""

    messages: list[dict[str, Any]]
    """`content` is a string or a list of `{"type": "text", "text": ...}`; tool calls' `arguments` are objects."""
    tools: list[dict[str, Any]] | None = None


Prompt = str | Chat | list[int]
"""What a request may begin with."""


@dataclass(frozen=True)
class ChatTemplate:
    """A model's templates by name, and the special tokens that they may name.

    Immutable but for what it keeps compiled: `render` is for one thread.
    """

    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]
    """As transformers names them: "bos_token", "eos_token", ..."""
    _compiled: dict[str, tuple[CompiledTemplate, bool]] = field(default_factory=dict)

    @classmethod
    def from_folder(
        cls, folder: str | PathLike[str], tokenizer_config: Mapping[str, Any]
    ) -> ChatTemplate | None:
        """From a Hugging Face folder; None if it has no template. Template files go before its config's."""
        given = tokenizer_config.get("chat_template")
        if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
            given = {entry.get("name"): entry.get("template") for entry in given}
        sources = {DEFAULT: given} if isinstance(given, str) else given or {}
        files = {path.stem: path for path in Path(folder, "additional_chat_templates").glob("*.jinja")}
        if (path := Path(folder, "chat_template.jinja")).is_file():
            files[DEFAULT] = path
        if files:
            sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
            raise CorruptCheckpoint(
                "tokenizer_config.json: chat_template is neither a template nor a list of named ones"
            )
        tokens = {name: token for name, token in tokenizer_config.items() if name.endswith("_token")}
        tokens = {
            n: token.get("content") if isinstance(token, dict) else token for n, token in tokens.items()
        }
        return cls(sources, {n: t for n, t in tokens.items() if isinstance(t, str)}) if sources else None

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> ChatTemplate | None:
        """From a GGUF file's metadata; None if it has no template."""
        sources = {
            key.removeprefix(f"{_GGUF}."): metadata[key] for key in metadata if key.startswith(f"{_GGUF}.")
        }
        if _GGUF in metadata:
            sources[DEFAULT] = metadata[_GGUF]
        vocabulary = metadata.get("tokenizer.ggml.tokens", [])
        ids = {name: metadata.get(f"tokenizer.ggml.{word}_token_id") for word, name in _GGUF_TOKENS.items()}
        tokens = {
            f"{name}_token": vocabulary[token_id]
            for name, token_id in ids.items()
            if token_id is not None and token_id < len(vocabulary)
        }
        return cls(sources, tokens) if sources else None

    def render(self, chat: Chat) -> str:
        """The whole prompt, special tokens included, up to where the assistant's answer begins.

        Raises InvalidRequest if the template refuses the conversation or is damaged, RequestFailed if it fails.
        """
        template, takes_parts = self._find(chat.tools)
        messages = (
            chat.messages if takes_parts else [_with_joined_parts(message) for message in chat.messages]
        )
        return self._run(template, Chat(messages, chat.tools))

    def _find(self, tools: object) -> tuple[CompiledTemplate, bool]:
        """The template for such a conversation, and whether it knows content in parts."""
        name = WITH_TOOLS if tools is not None and WITH_TOOLS in self.sources else DEFAULT
        if name not in self.sources:
            raise InvalidRequest(
                f"the model has chat templates for {', '.join(sorted(self.sources))}, but no default one: "
                "pass the prompt as text to `stream` instead"
            )
        if name not in self._compiled:
            from motet.runtime.template_sandbox import CompiledTemplate

            template = CompiledTemplate(self.sources[name])
            self._compiled[name] = template, self._takes_parts(template)
        return self._compiled[name]

    def _run(self, template: CompiledTemplate, chat: Chat) -> str:
        return template.render(
            **self.special_tokens,
            messages=chat.messages,
            tools=chat.tools,
            documents=None,
            add_generation_prompt=True,
        )

    def _takes_parts(self, template: CompiledTemplate) -> bool:
        """Whether the template shows the text of a part, rather than fail or show the data around it."""
        probe = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._run(template, Chat([probe]))
        except (InvalidRequest, RequestFailed):
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _with_joined_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": "".join(part["text"] for part in content)}
    return message
