"""A model's chat template: Jinja in a sandbox, with the globals and filters that templates on the hub expect.

The environment is that of transformers' `apply_chat_template`. Knows no tokens. text.py owns one.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.gateway.errors import bad_request


class BadTemplate(ValueError):
    """The template of the model folder does not compile; the message says where."""


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


class ChatTemplate:
    """One compiled template.

    Args:
        source: Jinja.
        variables: what every rendering sees besides the messages: bos_token, eos_token, ...

    Raises:
        BadTemplate: the source does not compile.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise BadTemplate(f"chat template, line {error.lineno}: {error.message}") from error
        # Flat and once: `Template.render` would walk the environment's globals for every request.
        self._variables = {**self._template.globals, **variables}

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """The prompt's text. `messages` are plain JSON data.

        Raises:
            ApiError: 400, the template refuses these messages or fails on them.
        """
        variables = {**self._variables, **kwargs}
        variables["messages"] = messages
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            template = self._template
            context = Context(template.environment, variables, template.name, template.blocks)
            return "".join(template.root_render_func(context))
        except TemplateError as error:
            reason = error.message or type(error).__name__
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {error}"
        raise bad_request(f"the model's chat template cannot take these messages: {reason}", "messages")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().astimezone().strftime(format_)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts are no HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
