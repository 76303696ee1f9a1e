"""Chat templates beside transformers' `apply_chat_template`, and what they must not do."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.llama4.processing_llama4 import chat_template as LLAMA4
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as SMOLVLM

from motet.errors import CorruptCheckpoint, InvalidRequest, RequestFailed
from motet.runtime import template_sandbox
from motet.runtime.chat_template import Chat, ChatTemplate
from motet.runtime.models.gguf_file import GGUFFile
from motet.runtime.models.hf_folder import HFFolder
from motet.runtime.models.loader import find_model
from tests.tiny import tiny_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# In the manner of the families that are about: each uses what others do not.
CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
BRACKETS = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}{% else %}{% set rest = messages %}
{% set system = '' %}{% endif %}
{% for message in rest %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Roles must alternate, not ' + message['role'] + ' ' + loop.index|string) }}
  {% endif %}
  {% if message['role'] == 'user' %}
[INST] {{ (system if loop.first else '') + message['content'].strip() }} [/INST]
  {% elif message['role'] == 'assistant' %}
 {{ message['content'] | trim }} {{ eos_token }}
  {% endif %}
{% endfor %}
"""
TOOLS = """\
{%- macro show(tool, depth=1) -%}
    {{- '  ' * depth ~ tool.name ~ ': ' ~ tool | tojson(indent=2) -}}
{%- endmacro %}
{{- bos_token }}{{- strftime_now('%Y') }}
{%- if tools %}
    {%- for tool in tools %}{{ show(tool.function if tool.function is defined else tool) }}{{ '\\n' }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1, names=[]) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == 'user' and not message.content.startswith('<tool>') %}{%- set ns.last = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'tool' or loop.length > 1 %}
    {%- if message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<call>' ~ {'name': call.name, 'arguments': call.arguments} | tojson ~ '</call>' }}
        {%- endfor %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{% set inner = 'A' %}{{ inner ~ message.content }}{% endgeneration %}
    {%- else %}
        {{- loop.index ~ message.role ~ (' after ' if loop.index0 > ns.last else ' ') }}
        {{- message.content | replace('\\u2028', ' ') ~ (loop.previtem or {}).get('role', '-') }}
        {%- if loop.last %}{{ '!' }}{% endif %}
    {%- endif %}
    {{- inner | default('none') }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
PARTS = """\
{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}[{{ part.type }}] {{ part.text | trim }}{% endfor %}{% endif %}</turn>
{% endfor %}
"""
TEMPLATES = {
    "chatml": CHATML,
    "brackets": BRACKETS,
    "tools": TOOLS,
    "parts": PARTS,
    "llama4": LLAMA4,
    "smolvlm": SMOLVLM,
    "smollm2": GGUFFile(find_model("demo")).metadata["tokenizer.chat_template"],
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the weather is at a <place> & time, in °C.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"place": "Zürich"}}}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "  Hello <there> & 'you', 你好\n"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two "},
        {"role": "user", "content": "Three"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"degrees": 7}'},
    ],
}


def transformers_tokenizer(source: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), chat_template=source, **TOKENS)


@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no_tools", "with_tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name: str, conversation: str, tools: list | None):
    messages = CONVERSATIONS[conversation]
    ours = ChatTemplate({"default": TEMPLATES[name]}, TOKENS)
    try:
        expected = transformers_tokenizer(TEMPLATES[name]).apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )
    except Exception:
        with pytest.raises((InvalidRequest, RequestFailed)):
            ours.render(Chat(messages, tools))
    else:
        assert ours.render(Chat(messages, tools)) == expected
        assert expected or name == "brackets"


def test_most_of_those_texts_exist():
    """So that the comparison above is not one of errors."""
    refused = 0
    for source in TEMPLATES.values():
        for messages in CONVERSATIONS.values():
            try:
                ChatTemplate({"default": source}, TOKENS).render(Chat(messages, [WEATHER]))
            except (InvalidRequest, RequestFailed):
                refused += 1
    assert refused <= len(TEMPLATES) * len(CONVERSATIONS) // 4


def test_parts_go_as_they_are_to_a_template_that_knows_them():
    messages = [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}]
    for source in (PARTS, LLAMA4, SMOLVLM):
        expected = transformers_tokenizer(source).apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        assert ChatTemplate({"default": source}, TOKENS).render(Chat(messages)) == expected


def test_parts_are_one_text_to_a_template_that_knows_only_texts():
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    for source in (CHATML, BRACKETS, TEMPLATES["smollm2"]):
        template = ChatTemplate({"default": source}, TOKENS)
        assert template.render(Chat([{"role": "user", "content": parts}])) == template.render(
            Chat([{"role": "user", "content": "Hello, you"}])
        )


def test_the_date_is_todays():
    template = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {})
    assert template.render(Chat([])) == datetime.now().strftime("%d %b %Y")


def test_tools_choose_the_template_that_is_for_them():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(Chat([])) == "plain"
    assert template.render(Chat([], [])) == template.render(Chat([], [WEATHER])) == "tools"
    with pytest.raises(InvalidRequest, match=r"templates for rag, tool_use, but no default"):
        ChatTemplate({"rag": "a", "tool_use": "b"}, {}).render(Chat([]))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (
            "{{ raise_exception('only two roles') }}",
            InvalidRequest,
            "refuses this conversation: only two roles",
        ),
        ("{% for %}", InvalidRequest, "no Jinja template"),
        ("{{ messages.nothing.more }}", RequestFailed, "UndefinedError"),
        ("{{ ''.__class__.__mro__ }}", RequestFailed, "SecurityError"),
        ("{{ messages.append(1) }}", RequestFailed, "SecurityError"),
        ("{% include 'other' %}", RequestFailed, "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", RequestFailed, "RecursionError"),
        ("{% for i in range(10**9) %}{% endfor %}", RequestFailed, "OverflowError"),
        ("{{ 9 ** (9 ** 9) }}", RequestFailed, "too large"),
    ],
)
def test_a_template_that_fails_is_that_conversations_error(source: str, error: type, message: str):
    with pytest.raises(error, match=message):
        ChatTemplate({"default": source}, {}).render(Chat([{"role": "user", "content": "a"}]))


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(90000) if range(90000)|list|length < 0 %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in [1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    ],
    ids=["loops", "filter", "macro", "recursive"],
)
def test_a_template_without_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    template = ChatTemplate({"default": source}, {})
    before = time.thread_time()
    # Whichever bound a fast or a slow machine meets first.
    with pytest.raises(RequestFailed, match=r"did not end within|builds too much"):
        template.render(Chat([]))
    assert time.thread_time() - before < 2.0


def test_ordinary_products_are_computed():
    assert (
        ChatTemplate({"default": "{{ '-' * 3 ~ 2 * 3 ~ 2 ** 10 ~ 0.5 * 3 ~ 2 ** -1 }}"}, {}).render(Chat([]))
        == f"---610241.5{2**-1}"
    )


def save(folder: Path, **config: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def read(folder: Path) -> ChatTemplate | None:
    return ChatTemplate.from_folder(folder, json.loads((folder / "tokenizer_config.json").read_text()))


def test_a_folders_template_is_in_its_config_or_in_files(tmp_path: Path):
    assert read(save(tmp_path, bos_token="<s>")) is None
    one = read(
        save(tmp_path, chat_template="T", bos_token={"content": "<s>"}, eos_token="</s>", pad_token=None)
    )
    assert (one.sources, one.special_tokens) == ({"default": "T"}, TOKENS)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "U"}]
    assert read(save(tmp_path, chat_template=named)).sources == {"default": "D", "tool_use": "U"}
    (tmp_path / "chat_template.jinja").write_text("F\né")
    assert read(tmp_path).sources == {"default": "F\né"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("G")
    assert read(tmp_path).sources == {"default": "F\né", "tool_use": "G"}


def test_what_transformers_saves_is_read(tmp_path: Path):
    for sources in ("{{ bos_token }}a", {"default": "b{{ eos_token }}", "tool_use": "c"}):
        tokenizer = transformers_tokenizer("")
        tokenizer.chat_template = sources
        tokenizer.save_pretrained(tmp_path)
        ours = read(tmp_path)
        assert ours.sources == (sources if isinstance(sources, dict) else {"default": sources})
        messages = CONVERSATIONS["one"]
        assert ours.render(Chat(messages)) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize("wrong", [5, [{"name": "default"}], ["a"], {"default": None}])
def test_a_template_of_a_wrong_type_is_a_damaged_model(tmp_path: Path, wrong: object):
    with pytest.raises(CorruptCheckpoint, match="chat_template"):
        read(save(tmp_path, chat_template=wrong))


def test_a_gguf_files_templates_and_tokens_are_in_its_metadata():
    metadata = {
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 7,
    }
    assert ChatTemplate.from_gguf(metadata) is None
    metadata |= {"tokenizer.chat_template": "T", "tokenizer.chat_template.tool_use": "U"}
    template = ChatTemplate.from_gguf(metadata | {"tokenizer.chat_templates": ["tool_use"]})
    assert (template.sources, template.special_tokens) == ({"default": "T", "tool_use": "U"}, TOKENS)
    demo = GGUFFile(find_model("demo")).chat_template()
    assert demo.special_tokens["bos_token"] == "<|im_start|>"
    assert re.match(r"<\|im_start\|>system", demo.render(Chat(CONVERSATIONS["one"])))


def test_a_models_folder_tells_its_template(tiny_folder: Path):
    assert HFFolder(tiny_folder).chat_template() is None


def test_the_demo_models_prompt_is_that_of_transformers():
    demo = GGUFFile(find_model("demo"))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=demo.tokenizer()._backend, chat_template=TEMPLATES["smollm2"]
    )
    for messages in CONVERSATIONS.values():
        if all("content" in message for message in messages):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            text = demo.chat_template().render(Chat(messages))
            assert demo.tokenizer().encode(text, add_special_tokens=False) == expected
