"""Request fields that aserve knows but does not offer, and those it takes without effect.

A client that asks for something must not get an answer that silently lacks it: such a field is refused by name,
unless its value asks for nothing (null, or what happens anyway). Used by the schemas before validation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from aserve.core.errors import UnsupportedFieldError

logger = logging.getLogger(__name__)

_MANY = 5

# Field -> the values, besides null, that ask for nothing.
NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "echo": (False,),
    "suffix": ("",),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "typical_p": (1.0,),
    "mirostat": (0,),
}

WITHOUT_EFFECT = frozenset(
    {
        "parallel_tool_calls",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""Taken with any value: hints about caching, or about fields that are refused themselves."""


def _asks_for_nothing(value: Any, neutral: Iterable[Any]) -> bool:
    return value is None or any(type(value) is type(other) and value == other for other in neutral)


UnknownFields = Literal["refuse", "warn", "ignore"]
"""What becomes of a request with a field that nobody here knows: a 400, or an answer without it."""


def drop_fields_not_offered(
    body: Mapping[str, Any], known: frozenset[str], unknown: UnknownFields = "refuse"
) -> dict[str, Any]:
    """Return the fields that the schema ``known`` handles.

    Raises UnsupportedFieldError for the first other one that asks for something; one that nobody knows is left out
    instead if ``unknown`` says so, with one line in the log under "warn".
    """
    kept: dict[str, Any] = {}
    left_out: list[str] = []
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in NOT_OFFERED:
            if not _asks_for_nothing(value, NOT_OFFERED[name]):
                raise UnsupportedFieldError(f"'{name}' is not supported by this server", param=name)
        elif name not in WITHOUT_EFFECT:
            shown = name if len(name) <= 60 else name[:60] + "…"
            if unknown == "refuse":
                raise UnsupportedFieldError(f"'{shown}' is not a known request field", param=shown)
            left_out.append(shown)
    if left_out and unknown == "warn":
        logger.warning("request fields that nobody knows were left out: %s", ", ".join(map(repr, left_out[:_MANY])))
    return kept
