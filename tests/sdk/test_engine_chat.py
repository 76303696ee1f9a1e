"""Chats: from messages to the model's own prompt, and what is no conversation."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import BaseModel
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from motet import AsyncEngine, InvalidRequest, RequestFailed, SamplingParams
from motet.runtime import template_sandbox
from tests.sdk.checks import settled
from tests.sdk.conftest import CONFIG
from tests.tiny import greedy, tiny_tokenizer

pytestmark = pytest.mark.anyio
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
TEMPLATE = """\
{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}
{% for message in messages %}
{% if message.role == 'rude' %}{{ raise_exception('be polite') }}{% endif %}
{% if message.role == 'endless' %}
{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}
{% endif %}
{% if message.role == 'broken' %}{{ message.content.nothing.more }}{% endif %}
{{ message.role[0] }}:{{ message.content }}{% for call in message.tool_calls or [] %}
{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}a:{% endif %}"""
HELLO = [{"role": "user", "content": "hello"}]
RING: list[object] = []
RING.append(RING)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """With a chat template, and a BOS of its own before any text."""
    backend = tiny_tokenizer()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="session")
def chatty_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, tokenizer: PreTrainedTokenizerFast
) -> Path:
    folder = tmp_path_factory.mktemp("chatty") / "model"
    shutil.copytree(tiny_folder, folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
async def chatty(chatty_folder: Path, anyio_backend: str) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine(chatty_folder, CONFIG) as engine:
        yield engine
        await settled(engine)


async def test_the_prompt_is_that_of_transformers(
    chatty: AsyncEngine, tokenizer: PreTrainedTokenizerFast, tiny_model: LlamaForCausalLM
):
    messages = [
        {"role": "system", "content": "Sei nett."},
        {"role": "user", "content": "wie geht's?"},
        {"role": "assistant", "tool_calls": [call({"place": "Zürich"})]},
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, return_dict=False
    )
    completion = await chatty.chat(messages, SHORT, tools=tools).result()
    assert list(completion.prompt_token_ids) == expected
    assert expected.count(0) == 1, "one BOS"
    assert list(completion.token_ids) == greedy(tiny_model, expected, 12)


async def test_a_chat_is_a_stream_like_any_other(chatty: AsyncEngine):
    texts = [token.text async for token in chatty.chat(HELLO, SHORT, tenant="a", request_id="b", deadline=60)]
    again = await chatty.chat(HELLO, SHORT, tenant="a").result()
    assert "".join(texts) == again.text
    with pytest.raises(InvalidRequest, match="deadline"):
        chatty.chat(HELLO, deadline=0)


def call(arguments: object) -> dict:
    return {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


class Message(BaseModel):
    """As OpenAI's client gives it."""

    role: str
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[dict] | None = None


async def test_messages_may_be_spelled_in_all_ways_of_the_openai_shape(chatty: AsyncEngine):
    async def prompt(*messages: object) -> tuple[int, ...]:
        return (await chatty.chat(messages, SamplingParams(max_tokens=0)).result()).prompt_token_ids

    plain = await prompt({"role": "user", "content": "hello"})
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert await prompt({"role": "user", "content": parts}) == plain
    assert await prompt(Message(role="user", content="hello")) == plain
    assert await prompt({"role": "user", "content": "hello", "name": None}) == plain

    called = await prompt({"role": "assistant", "tool_calls": [call({"a": [1]})]})
    assert await prompt({"role": "assistant", "content": None, "tool_calls": [call('{"a": [1]}')]}) == called
    assert await prompt(Message(role="assistant", tool_calls=[call('{"a": [1]}')])) == called


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages must be a list, not str"),
        ({"role": "user"}, "messages must be a list, not dict"),
        ([], "messages is empty"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([*HELLO, {"content": "a"}], r"messages\[1\] needs a role"),
        ([{"role": 5, "content": "a"}], r"messages\[0\] needs a role"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a list, not int"),
        ([{"role": "user", "content": b"a"}], r"messages\[0\].content is of type bytes"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'; only parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\] has no text"),
        ([{"role": "assistant", "tool_calls": 5}], r"tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\] needs a function"),
        ([{"role": "assistant", "tool_calls": [call("{")]}], r"arguments is not JSON"),
        ([{"role": "assistant", "tool_calls": [call("5")]}], r"arguments must be a JSON object"),
        ([{"role": "user", "content": "a", "when": object()}], r"messages\[0\].when is of type object"),
        ([{"role": "user", "content": "a", "more": RING}], "nested too deeply"),
        ([{"role": "assistant", "tool_calls": [call("[" * 100_000)]}], "nested too deeply"),
    ],
)
async def test_what_is_no_conversation_is_refused_at_once(
    chatty: AsyncEngine, messages: object, message: str
):
    with pytest.raises(InvalidRequest, match=message):
        chatty.chat(messages)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("weather", "tools must be a list"),
        ([print], r"tools\[0\] is of type builtin"),
        (["a"], r"tools\[0\] must"),
        ([{"function": RING}], "nested too deeply"),
    ],
)
async def test_what_are_no_tools_is_refused_at_once(chatty: AsyncEngine, tools: object, message: str):
    with pytest.raises(InvalidRequest, match=message):
        chatty.chat(HELLO, tools=tools)


async def test_what_a_template_refuses_or_fails_at_ends_that_chat_alone(
    chatty: AsyncEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    bystander = chatty.stream([5, 6], SHORT)
    for role, error, message in (
        ("rude", InvalidRequest, "be polite"),
        ("broken", RequestFailed, "UndefinedError"),
        ("endless", RequestFailed, "did not end"),
    ):
        stream = chatty.chat([{"role": role, "content": "a"}], SHORT)
        with pytest.raises(error, match=message):
            await stream.__anext__()
    assert len((await bystander.result()).token_ids) == 12
    await chatty.chat(HELLO, SHORT).result()


async def test_case_29_a_model_without_a_chat_template_says_so(engine: AsyncEngine):
    with pytest.raises(InvalidRequest, match="the model has no chat template"):
        engine.chat(HELLO)
    await engine.generate("hello", SHORT)


async def test_the_conversation_is_what_it_was_at_the_call(chatty: AsyncEngine):
    message = {"role": "user", "content": "hello"}
    stream = chatty.chat([message], SHORT)
    message["content"] = "changed"
    assert (await stream.result()).prompt_token_ids == (
        await chatty.chat(HELLO, SHORT).result()
    ).prompt_token_ids
