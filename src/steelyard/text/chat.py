"""Renders a conversation into a prompt with the model's own Jinja template, in a sandbox.

Templates are written for the environment of Hugging Face transformers; this one has the same names and rules. A
template is code that came with the model: the sandbox keeps it from the interpreter, not from wasting time, so a
template sent by a client must never come here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from steelyard.errors import InvalidRequest

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "probe-of-content"


class ChatTemplate:
    """A compiled template. `source` None, or one that does not compile: `render` says so, all else works on.

    bos_token, eos_token  their texts, as templates name them
    """

    def __init__(self, source: str | None, bos_token: str | None, eos_token: str | None) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._template: jinja2.Template | None = None
        self._why_not = "this model has no chat template; use /v1/completions"
        if source is None:
            return
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            self._why_not = f"this model's chat template is broken (line {error.lineno}: {error.message})"
            return
        self._wants_parts = self._needs_parts()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text, with every special token in it: encode it with add_special_tokens=False.

        kwargs  further variables of the template (`chat_template_kwargs` of a request: enable_thinking, documents)
        Raises InvalidRequest where there is no template, a message is malformed, or the template refuses.
        """
        if self._template is None:
            raise InvalidRequest(self._why_not, param="messages", code="no_chat_template")
        plain = [_message(m, i, self._wants_parts) for i, m in enumerate(messages)]
        variables = {**self._tokens, **kwargs, "messages": plain, "tools": list(tools) if tools else None}
        variables["add_generation_prompt"] = add_generation_prompt
        variables.setdefault("documents", None)
        try:
            return self._template.render(_plain(variables))
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"messages: the chat template refuses them: {error}", param="messages") from None
        except RecursionError:
            raise InvalidRequest("messages: nested too deeply for the chat template", param="messages") from None
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
            raise InvalidRequest(
                f"messages: the chat template cannot render them ({type(error).__name__}: {error})", param="messages"
            ) from None

    def _needs_parts(self) -> bool:
        """Whether content must be a list of parts: tried out, as templates do not say.

        A string is what nearly all take; a few (vision models') show nothing of it and iterate over parts.
        """
        as_parts = [{"type": "text", "text": _PROBE}]
        return not self._shows(_PROBE) and self._shows(as_parts)

    def _shows(self, content: Any) -> bool:
        assert self._template is not None
        variables = {**self._tokens, "messages": [{"role": "user", "content": content}], "tools": None}
        try:
            return _PROBE in self._template.render(variables | {"add_generation_prompt": True, "documents": None})
        except Exception:  # any failure of a stranger's code means: not in this form
            return False


def _message(message: Mapping[str, Any], index: int, wants_parts: bool) -> dict[str, Any]:
    """A message as templates expect it: no None values, plain text content, arguments of tool calls as objects."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}]: must be an object with a role", param=f"messages[{index}]")
    out = {key: value for key, value in message.items() if value is not None}
    content = out.get("content")
    if isinstance(content, list | tuple):
        texts = [_text_of(part, index, i) for i, part in enumerate(content)]
        out["content"] = [{"type": "text", "text": t} for t in texts] if wants_parts else "\n".join(texts)
    elif isinstance(content, str) and wants_parts:
        out["content"] = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, str):
        where = f"messages[{index}].content"
        raise InvalidRequest(f"{where}: must be a string or a list of parts", param=where)
    if isinstance(out.get("tool_calls"), list):
        out["tool_calls"] = [_tool_call(call) for call in out["tool_calls"]]
    reasoning = next((out[name] for name in _REASONING_NAMES if name in out), None)
    return out if reasoning is None else {"thinking": reasoning, **out, "reasoning_content": reasoning}


def _text_of(part: Any, index: int, part_index: int) -> str:
    where = f"messages[{index}].content[{part_index}]"
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequest(f"{where}: only text parts are supported, got {kind!r}", param=where)


def _tool_call(call: Any) -> Any:
    """Clients send a call's arguments as JSON text; templates write them out themselves and want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _plain(value: Any) -> Any:
    """Only JSON's own types reach a template: methods of anything else are a way out of the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012, the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Refuses attributes that begin with an underscore, the way to an object's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may have an attribute called self
        self, *rest = args
        for name in (attributes := dict(*rest, **kwargs)):
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which would change the prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for `dict`, whose class attributes a template must not reach."""
    return dict(*args, **kwargs)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _new_dict,
    }
    return environment
