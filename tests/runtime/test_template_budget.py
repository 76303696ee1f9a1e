"""What a chat template may build: hostile ones are ended before they take much memory, ordinary ones see none of it."""

from __future__ import annotations

import tracemalloc

import pytest
from transformers import PreTrainedTokenizerFast

from motet.errors import InvalidRequest, RequestFailed
from motet.runtime import template_budget
from motet.runtime.chat_template import Chat, ChatTemplate
from tests.tiny import tiny_tokenizer

MOST = 1 << 20
"""In these tests, for their speed."""

BEGIN = (
    f"{{% set most = {MOST} %}}{{% set big = 'ab ' * (most // 12) %}}"
    "{% set ns = namespace(x='ab', l=[1], b='') %}{% set hole = 'x' * (most // 2) %}"
)
NEST = "{% for i in range(40) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"


def grown(item: str) -> str:
    """A list that keeps many of what each costs little."""
    return "{% for i in range(1000) %}{% set ns.l = ns.l + [" + item + "] %}{% endfor %}"


HOSTILE = {
    "product": "{{ 'a' * 10**9 }}",
    "list_product": "{{ [1] * 10**9 }}",
    "product_of_lists": "{% set x = [big] * 1000 %}{{ x }}",
    "binary": "{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "list_plus": "{% for i in range(40) %}{% set ns.l = ns.l + ns.l %}{% endfor %}",
    "tilde": "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "tilde_wide": "{{ " + " ~ ".join(["big"] * 200) + " }}",
    "keeps": grown("big ~ i"),
    "slices": grown("big[1:]"),
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent_star": "{{ '%*d' % (1000000000, 1) }}",
    "percent_prec": "{{ '%.1000000000f' % 1.0 }}",
    "percent_map": "{{ ('%(a)s' * 1000) % {'a': big} }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format_nested": "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "format_prec": "{{ '{:.1000000000f}'.format(1.0) }}",
    "format_many": "{{ ('{0}' * 1000).format(big) }}",
    "format_repr": NEST + "{{ '{!r}'.format(ns.l) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format_attr": "{{ ('{:1000000000}'|attr('format'))(1) }}",
    "center": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "rjust": "{{ 'a'.rjust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "negative": "{% set x = 'a'.center(-10**9) %}{{ [1]|batch(-10**9)|list }}{{ 'a' * (most * 3) }}",
    "expandtabs": "{{ ('\\t' * 1000).expandtabs(1000000) }}",
    "replace": "{{ big.replace('', big) }}",
    "join": "{{ big.join('ab' * 1000) }}",
    "join_gen": "{{ ' '.join(range(100000)|map('replace', '1', big)) }}",
    "join_plain": "{{ ''.join([big] * 3 + [big] * 3 + [big]*3) }}",
    "translate": "{{ big.translate({97: big}) }}",
    "encode": grown("big.encode('utf-32')"),
    "to_bytes": "{{ (1).to_bytes(1000000000, 'big') }}",
    "to_bytes_kw": "{{ (1).to_bytes(byteorder='big', length=1000000000) }}",
    "split": grown("big.split()"),
    "split_sep": "{% set x = big.split('b') %}{% set y = big.split('a') %}{% set y = big.split('a') %}"
    "{% set y = big.split('a') %}",
    "upper": grown("big.upper()"),
    "f_center": "{{ 'a'|center(1000000000) }}",
    "f_center_kw": "{{ 'a'|center(width=1000000000) }}",
    "f_indent": "{{ ('\\n' * 1000)|indent(1000000, true, true) }}",
    "f_indent_str": "{{ ('\\n' * 1000)|indent(big, blank=true) }}",
    "f_replace": "{{ big|replace('a', big) }}",
    "f_replace_kw": "{{ big|replace(old='a', new=big) }}",
    "f_join": "{{ range(100000)|join(big) }}",
    "f_join_map": "{{ range(100000)|map('center', 1000)|join }}",
    "f_format": "{{ '%1000000000d'|format(1) }}",
    "f_format_kw": "{{ '%(a)1000000000d'|format(a=1) }}",
    "f_batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "f_batch1": "{{ big|batch(1)|list }}",
    "f_slice": "{{ [1]|slice(1000000000)|list }}",
    "f_tojson": "{{ [1]|tojson(indent=1000000000) }}",
    "f_tojson_sep": "{{ range(10000)|list|tojson(separators=(big, big)) }}",
    "f_tojson_nested": NEST + "{{ ns.l|tojson }}",
    "f_string": "{{ ([big] * 100)|string }}{{ ([big]*100)|upper }}",
    "f_list": "{{ big|list|length }}{{ big|list|length }}",
    "f_sum": "{{ ([[1] * 1000] * 1000)|sum(start=[])|length }}",
    "f_sum_attr": "{% set l = [1] * 10000 %}{{ ([{'a': l}] * 100)|sum(attribute='a', start=[])|length }}",
    "f_sort": "{{ ([big] * 100)|sort }}",
    "f_escape": "{{ ('<' * (most // 2))|e }}",
    "f_urlencode": "{{ ('\u2028' * (most // 2))|urlencode }}",
    "f_chain": grown("big|upper"),
    "nested": NEST + "{{ ns.l }}",
    "nested_dict": "{% for i in range(40) %}{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l }}",
    "nested_dictcall": "{% for i in range(40) %}{% set ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    "nested_tuple": "{% for i in range(40) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l == 1 }}",
    "nested_raise": NEST + "{{ raise_exception(ns.l) }}",
    "output": "{% for i in range(100000) %}{{ big }}{% endfor %}",
    "text": "{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}",
    "macro": "{% macro f() %}{% for i in range(100000) %}{{ big }}{% endfor %}{% endmacro %}{{ f() }}",
    "macro_keep": "{% macro f() %}{{ big }}{% endmacro %}{% for i in range(1000) %}{% set ns.l = ns.l + [f()] %}"
    "{% endfor %}",
    "block_set": "{% set x %}{% for i in range(100000) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "filter_block": "{% filter upper %}{% for i in range(100000) %}"
    + "x" * 10_000
    + "{% endfor %}{% endfilter %}",
    "autoescape": "{% autoescape true %}{% macro f() %}{% for i in range(1000) %}{{ '<' * (most // 8) }}{% endfor %}"
    "{% endmacro %}{{ f() }}{% endautoescape %}",
    "varargs": "{% macro f() %}{{ caller }}{% set ns.l = ns.l + [varargs] %}{% endmacro %}{% for i in range(100) %}"
    "{{ f(*big) }}{% endfor %}",
    "fromkeys": grown("{}.fromkeys(range(100000))"),
    "copies": "{% set m = [1] * (most // 64) %}{% for i in range(1000) %}{% set ns.l = ns.l + [m.copy()] %}"
    "{% endfor %}",
    "markup_plus": "{% set m = '<'|safe %}{% for i in range(30) %}{% set ns.b = m + ('<' * (most // 16)) ~ ns.b %}"
    "{% endfor %}{{ ns.b }}",
    "const": "{{ 'a'|center(1000000000) ~ 'b' }}",
}


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "MAX_BUILT", MOST)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_builds_too_much_is_ended_before_it_takes_the_memory(
    name: str, small_budget: None
) -> None:
    template = ChatTemplate({"default": BEGIN + HOSTILE[name]}, {})
    tracemalloc.start()
    try:
        with pytest.raises(RequestFailed, match="builds too much on this conversation"):
            template.render(Chat([]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 1.5 | round(100000000, 'ceil') }}",
        "{{ (0).from_bytes(('a' * 100000).encode(), 'big') }}",
        "{{ ('9' * 100000) | int(base=16) }}",
        "{{ strftime_now('%Y' * 1000) }}",
    ],
)
def test_a_number_that_would_take_long_to_compute_is_an_error(source: str) -> None:
    with pytest.raises(RequestFailed, match=r"OverflowError: .*(too large|longer|fewer)"):
        ChatTemplate({"default": source}, {}).render(Chat([]))


def test_a_budget_is_one_conversations_and_no_negative_number_adds_to_it(small_budget: None) -> None:
    template = ChatTemplate({"default": "{{ 'a' * (most // 4) }}".replace("most", str(MOST))}, {})
    for _ in range(5):
        assert len(template.render(Chat([]))) == MOST // 4
    wide = "{% set x = 'a'.center(-10**9) %}{{ [1] | batch(-10**9) | first }}{% set y = [1] * -10**9 %}"
    with pytest.raises(RequestFailed, match="builds too much"):
        ChatTemplate({"default": f"{wide}{{{{ 'a' * {MOST * 2} }}}}"}, {}).render(Chat([]))


ORDINARY = {
    "operators": "{{ 'a' + 'b' ~ 3 ~ none ~ [1, 'x'] ~ {'a': 1} ~ undefined_name }}{{ [1] + [2] }}{{ 'ab' * 2 }}"
    "{{ 7 % 4 }}",
    "percent": "{{ '%s-%5d|%-5s|%.2f|%%' % ('a', 7, 'b', 1.234) }}",
    "percent_mapping": "{{ '%(a)s %(b)r' % {'a': 1, 'b': 'x'} }}{{ '%s|%s' | format(1, 'b') }}"
    "{{ '%(a)s' | format(a=3) }}",
    "format": "{{ '{} {:>5} {a!r:<6}|{b[0]}'.format(1, 'x', a='y', b=[4]) }}{{ '{a}'.format_map({'a': 5}) }}",
    "html": "{{ ('<b>{}</b>' | safe).format('<') }}{{ ('<' | escape) + '<' }}{{ '<' | e ~ '&' }}",
    "methods": "{{ 'a'.center(5) }}{{ 'a'.ljust(3) }}{{ '7'.zfill(3) }}{{ 'a\tb'.expandtabs(4) }}"
    "{{ 'aXb'.replace('X', '--') }}"
    "{{ '-'.join(['a', 'b']) }}{{ ' a b '.split() }}{{ 'a,b'.split(',')[-1] }}{{ 'a\nb'.splitlines() }}"
    "{{ 'ab'.translate({97: 'xyz'}) }}{{ 'é'.encode() }}{{ (258).to_bytes(2, 'big') }}{{ {'a': 1}.get('a') }}",
    "filters": "{{ 'a' | center(5) }}|{{ 'a\nb' | indent(2) }}|{{ 'a\nb' | indent('> ', true) }}"
    "|{{ 'aa' | replace('a', 'b', 1) }}"
    "|{{ [1, 'b'] | join('+') }}|{{ messages | join(',', attribute='role') }}|{{ [1, 2, 3] | batch(2, 0) | list }}"
    "|{{ [1, 2, 3] | slice(2) | list }}|{{ [1, 2] | sum }}|{{ [[1], [2]] | sum(start=[]) }}|{{ [3, 1] | sort }}"
    "|{{ 2.567 | round(2) }}|{{ [1, [2]] | string | upper }}|{{ 'ab' | list }}|{{ [1, 1, 2] | unique | list }}"
    "|{{ messages | map(attribute='role') | map('upper') | join }}|{{ 'ff' | int(base=16) }}"
    "|{{ none | default('d', true) }}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "blocks": "{% set x %}{{ messages[0].role }}!{% endset %}{{ x }}{% filter upper %}abc{% endfilter %}"
    "{% macro m(a, b=[1]) %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ m(1, 2, 3) }}",
    "nested": "{% set pairs = [(1, 'a'), (2, 'b')] %}{% for n, s in pairs %}{{ n ~ s }}{% endfor %}"
    "{{ messages[::-1][0].role }}"
    "{% set a, b = 1, 2 %}{{ a + b }}{{ dict(a=1, **{'b': 2}) }}{{ 'abc'[1:] }}"
    "{{ pairs | groupby(0) | list | length }}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_whatever_is_counted_an_ordinary_template_writes_what_it_does_in_transformers(name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<é>"}]
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), chat_template=ORDINARY[name])
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ChatTemplate({"default": ORDINARY[name]}, {}).render(Chat(messages)) == expected


def test_a_long_conversation_is_far_from_the_bound() -> None:
    """A million tokens or so, in a thousand messages, by a template that looks at each text many times."""
    source = (
        "{% set ns = namespace(all=[]) %}{% for message in messages %}{% set text = message.content | trim %}"
        "{% if '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}"
        "{% set ns.all = ns.all + [message] %}{{ '<|' + message['role'] + '|>' + text ~ '\n' }}{% endfor %}"
        "{{ ns.all[1:] | length }}{{ messages[:50] | tojson }}"
    )
    messages = [{"role": "user", "content": "word" * 1000 + "é"}] * 1000
    assert len(ChatTemplate({"default": source}, {}).render(Chat(messages))) > 4_000_000


@pytest.mark.parametrize(
    "source", ["{% for i in [1] %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
)
def test_a_template_that_python_cannot_compile_is_told_so(source: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"cannot be compiled \((SyntaxError|RecursionError|MemoryError)"
    ):
        ChatTemplate({"default": source}, {}).render(Chat([]))
