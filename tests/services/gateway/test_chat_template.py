"""Chat templates render as the Hugging Face library renders them, and cannot reach what they should not."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from seqmtp_serve.errors import InvalidField
from services.gateway.chat_template import ChatTemplate
from services.gateway.text_model import open_text_model

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&amp; é 😀</b>"}],
    [
        {"role": "user", "content": "  spaces \n\n lines  "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ not.a.template }} {% raw %}"},
    ],
]
TEMPLATES = {
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "loops": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "blocks": "{% if messages %}\n  {{- messages[0].role }}\n{%- endif %}\n  {% set x = namespace(n=0) %}\n{{ x.n }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "turn": "{{ messages | length }}{% if add_generation_prompt %}<turn>{% endif %}{{ tools is none }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=list(TEMPLATES))
def test_rendering_equals_the_library(source: str, chat: list[dict[str, Any]], turn: bool) -> None:
    expected, _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=turn)
    assert ChatTemplate(source).render(chat, add_generation_prompt=turn) == expected[0]


@pytest.mark.parametrize("chat", CHATS)
def test_the_shipped_models_template_equals_the_library(chat: list[dict[str, Any]]) -> None:
    from seqmtp_serve.checkpoint.open import open_checkpoint

    source = open_checkpoint("smollm2-135m-instruct").chat_template
    template = open_text_model("smollm2-135m-instruct").template
    assert template is not None
    expected, _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=True)
    assert template.render(chat) == expected[0]


def test_a_template_may_refuse_and_says_why() -> None:
    with pytest.raises(InvalidField, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CHATS[0])
    with pytest.raises(InvalidField, match="not valid Jinja"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
    ],
)
def test_a_template_stays_in_its_sandbox(attack: str) -> None:
    with pytest.raises(InvalidField):
        ChatTemplate(attack).render(CHATS[0])


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ("{{ 1 // parts }}", {"parts": 0}),
        ("{{ 10.0 ** power }}", {"power": 999}),
        ("{{ '{0} and {1}'.format(name) }}", {"name": 3}),
        ("{% for i in range(turns) %}x{% endfor %}", {"turns": 10**9}),
        ("{{ range(3) }}", {"range": 1}),
    ],
)
def test_a_variable_that_a_template_cannot_use_is_the_callers_mistake(source: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match="refused the messages"):
        ChatTemplate(source).render([], more=more)


def test_special_tokens_and_the_date_are_there() -> None:
    template = ChatTemplate("{{ bos_token }}{{ strftime_now('%Y') }}", {"bos_token": "<s>"})
    assert template.render(CHATS[0]) == f"<s>{datetime.now().year}"


def test_a_requests_own_variables_reach_the_template_and_none_of_the_servers() -> None:
    template = ChatTemplate("{{ eos_token }}{% if thinking %}<think>{% endif %}", {"eos_token": "E"})
    assert template.render([], more={"thinking": True}) == "E<think>"
    assert template.render([]) == "E"
    for name in ("messages", "eos_token", "add_generation_prompt", "self"):
        with pytest.raises(InvalidField, match=name):
            template.render([], more={name: 1})


def test_half_a_surrogate_pair_in_the_arguments_of_a_past_call_is_refused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}")

    def turns(arguments: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "", "calls": [("1", "f", arguments)]}]

    assert template.render(turns(r'{"a": "\ud83d\ude00"}')) == '{"a": "😀"}'
    with pytest.raises(InvalidField, match="surrogate"):
        template.render(turns(r'{"a": "\ud83d"}'))
