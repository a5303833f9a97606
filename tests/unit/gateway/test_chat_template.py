"""Chats rendered as SGLang renders them: held to what its own code made of the same chats, by made-up templates."""

from __future__ import annotations

import json
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.chat_template import ChatTemplate, Rendered, Unrendered

DATA = Path(__file__).parents[2] / "data"
RECORDED = json.loads((DATA / "sglang_chats.json").read_text())
NOW = datetime.fromisoformat(RECORDED["now"])
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


def template(source: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens, lambda: NOW)


TEMPLATES = {file.name: file.read_text() for file in (DATA / "chat_templates").iterdir()}
COMPILED = {name: template(source, eos_token="<|im_end|>") for name, source in TEMPLATES.items()}


def rendered(source: str, *contents: Any, **body: Any) -> str:
    messages = [{"role": "user", "content": content} for content in contents]
    return template(source).render({"messages": messages, **body}).text


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['template']}-{str(case['body'])[:60]}")
def test_a_chat_is_rendered_as_the_engine_rendered_it(case: dict[str, Any]) -> None:
    body = deepcopy(case["body"])
    if case["text"] is None:
        with pytest.raises(Unrendered):
            COMPILED[case["template"]].render(body)
    else:
        chat = COMPILED[case["template"]].render(body)
        assert chat.text + chat.answer_prefix == case["text"]
    assert body == case["body"], "the body goes on to the engines as it came"


def test_the_recording_covers_every_template_and_refusals() -> None:
    refused = sum(case["text"] is None for case in RECORDED["cases"])
    assert {case["template"] for case in RECORDED["cases"]} == TEMPLATES.keys()
    assert 10 < refused < len(RECORDED["cases"]) / 2


def test_an_answer_that_has_begun_is_apart() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    body = {"messages": messages, "continue_final_message": True}
    assert template(PLAIN).render(body) == Rendered("user:a;", "b")
    assert template(PLAIN).render({"messages": messages}) == Rendered("user:a;user:b;")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:x"}},
        {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "text"},
        {"type": ["text"], "text": "a"},
        {"type": {}},
        {"type": None},
        {},
        5,
        ["text"],
        "text",
    ],
)
def test_media_is_the_engines(part: Any) -> None:
    with pytest.raises(Unrendered, match="only the engine"):
        rendered(PLAIN, [{"type": "text", "text": "what is this?"}, part])


@pytest.mark.parametrize("name", ["chat_template", "add_generation_prompt", "tokenize", "messages", "tools"])
def test_what_means_something_to_the_engine_is_not_guessed(name: str) -> None:
    with pytest.raises(Unrendered, match="chat_template_kwargs"):
        rendered(PLAIN, "hi", chat_template_kwargs={name: "x"})


@pytest.mark.parametrize("tools", [[1], ["x"], [{}], [{"function": None}]])
def test_tools_that_are_none_are_the_engines_to_refuse(tools: Any) -> None:
    with pytest.raises(Unrendered, match="tools"):
        rendered(PLAIN, "hi", tools=tools)


@pytest.mark.parametrize("schema", [{"type": "varchar"}, {"properties": {"a": {"type": ["int", "null"]}}}])
def test_a_schema_that_the_engine_rewrites_is_not_rendered(schema: Any) -> None:
    with pytest.raises(Unrendered, match="types"):
        rendered(PLAIN, "hi", tools=[{"function": {"name": "x", "parameters": schema}}])


@pytest.mark.parametrize("tools", [5, True, "abc", {"a": 1}, {}, [5], [{}], [{"function": None}], [{"function": []}]])
@pytest.mark.parametrize("role", ["system", "assistant", "tool"])
def test_a_messages_own_tools_that_are_none_are_the_engines_to_refuse(role: str, tools: Any) -> None:
    with pytest.raises(Unrendered, match=r"^tools that SGLang refuses"):
        template(PLAIN).render({"messages": [{"role": role, "content": "x", "tools": tools}]})


@pytest.mark.parametrize(
    "calls",
    [
        *(5, True, "abc", {"a": 1}, {}, [5], [{}], [{"function": 5}]),
        *([{"function": {"arguments": "[1]"}}], [{"function": {"arguments": "{"}}]),
    ],
)
def test_tool_calls_that_are_none_are_the_engines_to_refuse(calls: Any) -> None:
    with pytest.raises(Unrendered, match=r"^tool_calls that SGLang refuses"):
        template(PLAIN).render({"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]})


@pytest.mark.parametrize("choice", [{}, {"function": 5}, {"function": {}}, {"function": [1]}])
def test_a_choice_of_no_tool_is_the_engines_to_refuse(choice: Any) -> None:
    tools = [{"function": {"name": "f"}}]
    with pytest.raises(Unrendered, match=r"^a tool_choice that SGLang refuses"):
        rendered(PLAIN, "hi", tools=tools, tool_choice=choice)


@pytest.mark.parametrize("effort", [True, "much", [], {}])
def test_an_effort_that_is_none_is_not_rendered(effort: Any) -> None:
    with pytest.raises(Unrendered, match="effort"):
        rendered(PLAIN, "hi", reasoning_effort=effort)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% break %}{% endfor %}", "{% nonsense %}"])
def test_what_is_no_template_is_said_at_once(source: str) -> None:
    with pytest.raises(ValueError, match="line 1"):
        template(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no such role') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ missing | tojson }}",
        "{{ 1 / 0 }}",
        "{{ 10.0 ** 400 }}",
        "{{ range(10 ** 9) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ [1] | sort(attribute='x.y') | first | int('a', 99) }}",
        "{{ 'x' | indent(width=messages) }}",
        "{% for a, b in [1] %}{% endfor %}",
        "{{ strftime_now(7) }}",
    ],
)
def test_a_template_that_fails_refuses(source: str) -> None:
    with pytest.raises(Unrendered, match="the chat template refuses it"):
        rendered(source, "hi")


def test_a_reason_does_not_hold_the_clients_text() -> None:
    with pytest.raises(Unrendered) as raised:
        rendered("{{ raise_exception(messages[0].content) }}", "x" * 100_000)
    assert len(str(raised.value)) < 300


def test_the_templates_surroundings_are_those_of_transformers() -> None:
    assert rendered("{{ messages[0].content | tojson }}", "<é> '&'") == "\"<é> '&'\""
    assert rendered("{{ {'b': 1, 'a': [2]} | tojson(indent=2) }}", "") == '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}'
    assert rendered("{{ strftime_now('%d %b %Y') }}", "") == "04 Mar 2026"
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny\n", "") == "x\ny"
    assert rendered("{% for n in [1,2,3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", "") == "1"
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi") == "hi!"
    assert rendered("{{ add_generation_prompt }}{{ documents is none }}{{ tools is none }}", "") == "TrueTrueTrue"


def test_special_tokens_have_names_that_arguments_overwrite() -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    named = template("{{ bos_token }}{{ eos_token }}", bos_token="<s>", eos_token="</s>")
    assert named.render(body).text == "<s></s>"
    assert named.render({**body, "chat_template_kwargs": {"bos_token": "!"}}).text == "!</s>"


@pytest.mark.parametrize(
    ("loop", "shown"),
    [
        ("{% for part in message['content'] %}{{ part.text }}|{% endfor %}", "a|b|"),
        ("{% for part in message.content | list %}{{ part.text }}|{% endfor %}", "a|b|"),
        ("{% for part in message.content[0:1] %}{{ part.text }}|{% endfor %}", "a|"),
        ("{{ message.content }}", "a b"),
        ("{{ message.content }}{# vision #}", "[{'type': 'text', 'text': 'a'}, {'type': 'text', 'text': 'b'}]"),
        ("{% for part in message.other %}{% endfor %}{{ message.content }}", "a b"),
    ],
)
def test_a_template_gets_parts_where_it_looks_for_them(loop: str, shown: str) -> None:
    source = "{% for message in messages %}" + loop + "{% endfor %}"
    assert rendered(source, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == shown
