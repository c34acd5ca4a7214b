"""A model's chat template: messages in, prompt text out, rendered by transformers' own sandboxed environment.

Owns which of several named templates is used, and finds out by a trial which form of messages the template reads. A
template that cannot be compiled is a fault of the model; one that fails on some messages is a fault of the request.
Called by the tokenizer. Rendering is thread-safe and may be slow: the engine does it in a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError, TemplateSyntaxError

from aserve.core.errors import InvalidRequestError, ModelLoadError
from aserve.text.messages import TemplateFormat, normalise

RESERVED_OPTIONS = frozenset(
    {
        "self",
        "messages",
        "conversations",
        "chat_template",
        "return_assistant_tokens_mask",
        "add_special_tokens",
        "tokenize",
    }
)
"""Names that are no template options: what is rendered, and how, is decided here."""

RENDERING_OPTIONS = frozenset(
    {"tools", "add_generation_prompt", "documents", "continue_final_message", "allow_control_tokens"}
)
"""Options that the rendering itself reads, beside the template: a program may set them, a request has fields for it."""

_PROBE = "aserve-probe-7f3a"


class ChatTemplate:
    """One template, or several by name: ``tool_use`` is taken when there are tools, else ``default``.

    Args:
        templates: a template's text, or texts by name with at least ``default``.
        special_tokens: what templates see as ``bos_token``, ``eos_token`` and so on.

    Raises:
        ModelLoadError: a template has a syntax error, or there are several and none is the default.
    """

    def __init__(self, templates: str | Mapping[str, str], special_tokens: Mapping[str, Any]) -> None:
        self._templates = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in self._templates:
            names = ", ".join(sorted(self._templates))
            raise ModelLoadError(
                f"the model has several chat templates ({names}) and none named default; "
                "choose one with --chat-template"
            )
        self._special_tokens = dict(special_tokens)
        self._formats = {name: self._probe(name) for name in self._templates}

    @property
    def text(self) -> str:
        """The default template."""
        return self._templates["default"]

    def render(
        self,
        messages: Sequence[Any],
        hide: Callable[[Any], Any] | None = None,
        /,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Return the prompt for some OpenAI messages; ``options`` become variables of the template.

        ``hide`` is applied to all that the caller wrote, once messages have the form that the template reads.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them; an option is reserved.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        if reserved := RESERVED_OPTIONS & options.keys():
            raise InvalidRequestError(f"{sorted(reserved)[0]} cannot be set", param="chat_template_kwargs")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            prepared = normalise(messages, self._formats[name])
            written: dict[str, Any] = {"tools": list(tools) if tools else None, **options}
            if hide is not None:
                prepared, written = hide(prepared), hide(written)
            return self._render(name, prepared, add_generation_prompt=add_generation_prompt, **written)
        except InvalidRequestError:
            raise
        except TemplateError as error:
            raise InvalidRequestError(
                f"the model's chat template does not accept these messages: {error.message}", param="messages"
            ) from error
        except Exception as error:  # whatever an expression in a template can raise: TypeError, KeyError, ...
            raise InvalidRequestError(
                f"the model's chat template failed on these messages: {error}", param="messages"
            ) from error

    def _render(self, name: str, messages: list[dict[str, Any]], /, **options: Any) -> str:
        from transformers.utils import chat_template_utils

        function = cast(Callable[..., tuple[list[str], Any]], cast(Any, chat_template_utils).render_jinja_template)
        variables = {**self._special_tokens, **options}
        return function([messages], chat_template=self._templates[name], **variables)[0][0]

    def _probe(self, name: str) -> TemplateFormat:
        content_parts = not self._shows(name, [{"role": "user", "content": _PROBE}]) and self._shows(
            name, [{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]
        )
        return TemplateFormat(
            content_parts=content_parts,
            arguments_as_text=self._wants_text_arguments(name, content_parts),
            developer_role="developer" in self._templates[name],
        )

    def _wants_text_arguments(self, name: str, content_parts: bool) -> bool:
        """Whether a mapping of arguments is not printed as JSON or item by item, but JSON text is."""

        def shown(arguments: Any) -> str:
            function = {"name": "f", "arguments": arguments}
            call = {"id": "call00001", "type": "function", "function": function}
            content: Any = [{"type": "text", "text": "a"}] if content_parts else "a"
            return self._attempt(
                name, [{"role": "user", "content": content}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            )

        arguments = {_PROBE: "x"}
        as_mapping = shown(arguments)
        if _PROBE in as_mapping and str(arguments) not in as_mapping:
            return False
        return json.dumps(arguments) in shown(json.dumps(arguments))

    def _shows(self, name: str, messages: list[dict[str, Any]]) -> bool:
        return _PROBE in self._attempt(name, messages)

    def _attempt(self, name: str, messages: list[dict[str, Any]]) -> str:
        """Render a trial; a template may refuse it, which says nothing about real requests."""
        try:
            return self._render(name, messages, add_generation_prompt=True)
        except TemplateSyntaxError as error:
            raise ModelLoadError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        except Exception:
            return ""
