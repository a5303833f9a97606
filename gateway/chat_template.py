"""A chat request as the text of its prompt, by the model's Jinja template and the rules SGLang applies before it. Pure.

The rules are SGLang 0.5's (`serving_chat.py`, `jinja_template_utils.py`, `protocol.py`), the environment is that of
transformers. What they depend on and we cannot see (parsers, server defaults) the join probe finds out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import orjson
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import clipped

# In the order in which SGLang shows them to a template; it drops what it does not know.
_MESSAGE_FIELDS = (
    *("role", "content", "tool_call_id", "name", "phase", "reasoning_content"),
    *("tool_calls", "tools", "prefix"),
)
_FUNCTION_FIELDS = ("description", "name", "parameters", "strict", "defer_loading")
_GENERIC_ROLES = frozenset({"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"})
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_SILENT_PARTS = frozenset({"thinking", "reasoning"})
"""Parts that SGLang takes and does not show to the template."""
_RESERVED_KWARGS = frozenset(
    {
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "self"),
    }
)
"""Names that mean something to transformers itself: what comes of them in `chat_template_kwargs` is not ours to say."""
_JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
_MAX_REASON_CHARS = 200


class Unrendered(Exception):
    """This chat has no prompt that we could know; the text says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt of a chat: `text`, then `answer_prefix`, the beginning of the answer, which is tokenized apart."""

    text: str
    answer_prefix: str = ""


class ChatTemplate:
    """One compiled template; ValueError when it is none.

    `special_tokens` are what it knows as bos_token and the like, `now` is its clock.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self._shows_parts = _shows_parts(source, environment)
        except jinja2.TemplateError as error:
            raise ValueError(f"line {getattr(error, 'lineno', '?')}: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, body: Mapping[str, Any]) -> Rendered:
        """The prompt of a chat completion's body; raises Unrendered."""
        messages = [_content_shown(message, self._shows_parts) for message in map(_message, body["messages"])]
        messages, answer_prefix = _answer_begun(messages, bool(body.get("continue_final_message")))
        names = {"documents": None, **self._special_tokens, **_template_kwargs(body)}
        tools = _tools(body)
        try:
            text = self._text(messages, tools, names)
        except Unrendered:
            if not tools:
                raise
            text = self._text(messages, [tool["function"] for tool in tools], names)  # as SGLang tries next
        return Rendered(text, answer_prefix)

    def _text(self, messages: list[Any], tools: list[Any] | None, names: Mapping[str, Any]) -> str:
        try:
            return self._template.render(messages=messages, tools=tools, add_generation_prompt=True, **names)
        except Exception as error:  # a template is a program of its own, and fails as programs do
            # What it says may hold all of the client's text.
            raise Unrendered(f"the chat template refuses it: {clipped(str(error), _MAX_REASON_CHARS)}") from error


# ---- the environment -------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _shows_parts(source: str, environment: ImmutableSandboxedEnvironment) -> bool:
    """Whether the template takes content as parts (SGLang's format `openai`), not only as text (`string`)."""
    if any(word in source for word in _MEDIA_WORDS):
        return True
    loops = environment.parse(source).find_all(nodes.For)
    return any(_is_content(loop.iter, name) for loop in loops for name in ("message", "msg", "m"))


def _is_content(node: nodes.Node | None, name: str) -> bool:
    """Whether the expression is `name.content`, filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, name)
    if isinstance(node, nodes.Getitem):
        is_key = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    else:
        is_key = isinstance(node, nodes.Getattr) and node.attr == "content"
    return is_key and isinstance(owner := getattr(node, "node", None), nodes.Name) and owner.name == name


# ---- messages --------------------------------------------------------------------------------------------------------


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the fields SGLang knows, in its order; raises Unrendered where SGLang refuses it."""
    role = given["role"]
    if role == "user" and given.get("content") is not None:
        return {"role": role, "content": given["content"]}
    if role.lower() not in _GENERIC_ROLES:
        raise Unrendered("a role that SGLang does not know")
    message = {name: given.get(name) for name in _MESSAGE_FIELDS}
    message["role"] = role.lower()
    if message["tools"] is not None:
        message["tools"] = _each("tools", message["tools"], _tool)
    if message["tool_calls"] is not None:
        parse = message["role"] == "assistant"
        message["tool_calls"] = _each("tool_calls", message["tool_calls"], lambda call: _tool_call(call, parse))
    return message


def _each(name: str, given: Any, shown: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """What each of a list is shown as; raises Unrendered where it is none, or one of it is not as SGLang wants it."""
    try:
        if not isinstance(given, list):
            raise TypeError("no list")
        return [shown(each) for each in given]
    except (KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise Unrendered(f"{name} that SGLang refuses") from error


def _tool_call(given: Any, parse: bool) -> dict[str, Any]:
    function = given["function"]
    arguments = function.get("arguments")
    if parse and isinstance(arguments, str):
        arguments = orjson.loads(arguments)
        if not isinstance(arguments, dict):
            raise TypeError("no object")
    call = {"id": given.get("id"), "index": given.get("index"), "type": given.get("type", "function")}
    return {**call, "function": {"name": function.get("name"), "arguments": arguments}}


def _content_shown(message: dict[str, Any], shows_parts: bool) -> dict[str, Any]:
    """The message with its content as the template wants it, and without what is null."""
    content = message["content"]
    if content is None:
        content = ""
    elif isinstance(content, list):
        parts = list(_parts(content))
        texts = [part["text"] for part in parts if "text" in part]
        joined = " ".join(texts)  # also where the template wants parts: SGLang does so for tools
        only_text = message["role"] == "tool" and len(texts) == len(parts)
        content = parts if shows_parts and not only_text else joined
    return {name: value for name, value in message.items() if value is not None} | {"content": content}


def _parts(content: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}
        elif kind == "tool_reference":
            yield {"type": kind, "name": part.get("name")}
        elif not isinstance(kind, str) or kind not in _SILENT_PARTS:
            raise Unrendered("it has parts that only the engine can turn into tokens")


def _answer_begun(messages: list[dict[str, Any]], goes_on: bool) -> tuple[list[dict[str, Any]], str]:
    """SGLang's way with an assistant that spoke last: its text begins the answer, or else becomes the user's."""
    last = messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return messages, ""
    if goes_on:
        return messages[:-1], last["content"]
    return [*messages[:-1], {"role": "user", "content": last["content"]}], ""


# ---- tools and arguments ---------------------------------------------------------------------------------------------


def _tools(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the template is shown; None where there are none, or none may be called."""
    choice = body.get("tool_choice")
    if not body.get("tools") or choice == "none":
        return None
    tools = _each("tools", body["tools"], _tool)
    if isinstance(choice, dict):
        function = choice.get("function")
        if not isinstance(function, dict) or "name" not in function:
            raise Unrendered("a tool_choice that SGLang refuses")
        tools = [tool for tool in tools if tool["function"]["name"] == function["name"]]
    return tools or None


def _tool(given: Any) -> dict[str, Any]:
    """A tool as SGLang shows it: the fields it knows, those of the function in the client's order."""
    function, later = given["function"], given.get("defer_loading")
    if not _standard_types(function.get("parameters")):
        raise Unrendered("a tool's schema has types that SGLang rewrites")
    known = [name for name in function if name in _FUNCTION_FIELDS]
    shown = {name: function.get(name) for name in (*known, *_FUNCTION_FIELDS)}
    if shown["defer_loading"] is None:
        shown["defer_loading"] = later
    for name in ("strict", "defer_loading"):
        if shown[name] is None:
            del shown[name]
    return {"type": given.get("type", "function"), "function": shown, "defer_loading": later}


def _standard_types(schema: Any) -> bool:
    """Whether every `type` of a JSON schema is one of JSON Schema's own."""
    if isinstance(schema, list):
        return all(map(_standard_types, schema))
    if not isinstance(schema, dict):
        return True
    types = schema.get("type")
    named = types if isinstance(types, list) else [types] if isinstance(types, str) else []
    return _JSON_TYPES.issuperset(map(str, named)) and all(map(_standard_types, schema.values()))


def _template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """What else the template is given: `chat_template_kwargs`, and what SGLang makes of the reasoning fields."""
    given = body.get("chat_template_kwargs")
    kwargs = dict(given) if isinstance(given, dict) else {}
    if not _RESERVED_KWARGS.isdisjoint(kwargs):
        raise Unrendered("chat_template_kwargs that mean something to the engine itself")
    effort = body.get("reasoning_effort")
    thinking: bool | None = None
    asked = body.get("reasoning")
    if isinstance(asked, dict):
        named = asked.get("effort") if asked.get("effort") is not None else asked.get("reasoning_effort")
        effort = named if named is not None else effort
        thinking = _is_on(asked.get("enabled") if asked.get("enabled") is not None else asked.get("enable")) or None
    if effort is not None:
        effort = _effort(effort)
        thinking = effort != "none"
    if thinking is not None:
        kwargs = {**kwargs, **{name: kwargs.get(name, thinking) for name in ("thinking", "enable_thinking")}}
    named = kwargs.pop("reasoning_effort", None)
    effort = named if named is not None else effort
    return kwargs if effort is None else {"reasoning_effort": effort, **kwargs}


def _is_on(value: Any) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "y", "on") if isinstance(value, str) else bool(value)


def _effort(effort: Any) -> str | float:
    if isinstance(effort, str) and effort in _EFFORTS:
        return effort
    if isinstance(effort, int | float) and not isinstance(effort, bool):
        return float(effort)
    raise Unrendered("a reasoning effort that SGLang refuses")
