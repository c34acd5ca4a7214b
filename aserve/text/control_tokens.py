"""Control tokens that somebody wrote out in a message: they stay text, and only the template's own become tokens.

A tokenizer reads ``<|im_end|>`` as the token that ends a turn wherever it stands, so a user's text could end its turn
and begin one of the system. Here such texts are hidden before the template is rendered, and the prompt is encoded by a
twin of the tokenizer that knows the control tokens under secret names: the template's are renamed, the users' are not.
Prompts without any take none of this way. Pure but for the secret; called by the tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any, cast

from aserve.core.errors import InvalidRequestError

_LOOKS_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # noqa: RUF001 - DeepSeek writes it with a wide bar


class ControlTokens:
    """The control tokens of one tokenizer: added tokens that are special, or written ``<|like this|>``.

    Others, such as ``<think>`` or ``<tool_call>``, are a part of what models write and templates look for in messages.

    Args:
        rust: a tokenizer of the ``tokenizers`` library; not modified.
    """

    def __init__(self, rust: Any) -> None:
        added = cast(Mapping[int, Any], rust.get_added_tokens_decoder())
        self._rust = rust
        self._ids = {
            cast(str, token.content): token_id
            for token_id, token in added.items()
            if token.content and (token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content))
        }
        nonce = secrets.token_hex(8)
        texts = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        # letters and digits alone: they come through whatever a template does to a text (trim, JSON, HTML)
        self._hidden = {text: f"q{nonce}h{n}q" for n, text in enumerate(texts)}
        self._renamed = {text: f"q{nonce}t{n}q" for n, text in enumerate(texts)}
        self._shown = {hidden: text for text, hidden in self._hidden.items()}
        self._hidden_pattern = re.compile(f"q{nonce}h[0-9]+q")
        self._break = f"q{nonce}bq"
        self._twin: tuple[Any, dict[int, int]] | None = None

    def hiding(self) -> Hiding:
        """What hides the control tokens of one prompt's messages."""
        return Hiding(self)

    def hide(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._hidden[match[0]], text)

    def encode(self, rendered: str, param: str) -> list[int]:
        """Return the ids of a rendered prompt with hidden control tokens in it.

        Raises InvalidRequestError for a tokenizer that cannot be copied.
        """
        twin, ids_of_twin = self._twin = self._twin or self._make_twin(param)
        renamed = self._pattern.sub(lambda match: self._renamed[match[0]], rendered)
        ids = self._encode(twin, self._hidden_pattern.sub(lambda match: self._shown[match[0]], renamed))
        if not self._control_ids.isdisjoint(ids):  # the model's own vocabulary has it whole, as in unigram models
            broken = self._hidden_pattern.sub(lambda match: self._broken(self._shown[match[0]]), renamed)
            ids = self._encode(twin, broken)
        return [ids_of_twin.get(i, i) for i in ids if ids_of_twin.get(i) != -1]

    @property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def _broken(self, text: str) -> str:
        return text[0] + self._break + text[1:]

    @staticmethod
    def _encode(twin: Any, text: str) -> list[int]:
        return cast(list[int], twin.encode(text, add_special_tokens=False).ids)

    def _make_twin(self, param: str) -> tuple[Any, dict[int, int]]:
        """The tokenizer with other names for its control tokens; and its ids for them, -1 for one to be dropped.

        Takes up to a second and as much memory as the tokenizer, once, when a message first needs it.
        """
        try:
            state = cast(dict[str, Any], json.loads(self._rust.to_str()))
        except Exception as error:  # a part written in Python
            raise InvalidRequestError(
                f"{param} holds a control token, which this model's tokenizer cannot read as text", param=param
            ) from error
        added = cast(list[dict[str, Any]], state["added_tokens"])
        for token in added:
            token["content"] = self._renamed.get(token["content"], token["content"])
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added.append({"id": 1 + max(token["id"] for token in added), "content": self._break, **plain})
        state |= {"post_processor": None, "truncation": None, "padding": None}
        make: Any = type(cast(object, self._rust))
        twin: Any = make.from_str(json.dumps(state))
        ids: dict[int, int] = {twin.token_to_id(name): self._ids[text] for text, name in self._renamed.items()}
        ids[twin.token_to_id(self._break)] = -1
        return twin, ids


class Hiding:
    """Hides the control tokens in the values of one prompt.

    Attributes:
        found: whether there were any.
    """

    def __init__(self, tokens: ControlTokens) -> None:
        self._tokens = tokens
        self.found = False

    def __call__(self, value: Any) -> Any:
        """Return a value of JSON's kinds with every control token in it hidden; what was given is not modified."""
        if isinstance(value, str):
            hidden = self._tokens.hide(value)
            self.found = self.found or hidden != value
            return hidden
        if isinstance(value, dict):
            return {self(key): self(item) for key, item in cast(dict[Any, Any], value).items()}
        if isinstance(value, list):
            return [self(item) for item in cast(list[Any], value)]
        return value
