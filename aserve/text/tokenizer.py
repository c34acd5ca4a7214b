"""Text to ids and back, for one model.

Owns the tokenizer of a model folder: encoding with or without special tokens, chat prompts, detokenizers, the ids that
end a text, and the sampling settings the model comes with. Knows nothing of requests or threads: every method may be
called from any thread, and the engine calls the slow ones (``encode``, ``encode_chat``) in a worker thread.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from aserve.core.errors import InvalidRequestError, ModelLoadError
from aserve.text.chat_template import ChatTemplate
from aserve.text.control_tokens import ControlTokens, Hiding
from aserve.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from aserve.text.loading import load_backend
from aserve.text.settings import TextSettings, read_settings
from aserve.text.token_bytes import TokenBytes, byte_scheme

NO_TEMPLATE = "the model has no chat template; use /v1/completions, or set a template with --chat-template"


class Tokenizer:
    """A loaded tokenizer. Made by ``load``.

    Attributes:
        vocab_size: ids in ``[0, vocab_size)`` are valid: the model's vocabulary, or the tokenizer's without a config.
        stop_token_ids: every id that ends a text, ascending: those of generation_config.json, config.json and the
            tokenizer's own; ids beyond the vocabulary are left out.
        generation_defaults: the model's recommended temperature, top_p, top_k, min_p and repetition_penalty, as far as
            generation_config.json states valid ones.
        chat_template: None if the model has none.
    """

    def __init__(self, backend: Any, settings: TextSettings, chat_template: ChatTemplate | None) -> None:
        """Wrap transformers' ``TokenizersBackend``; its hot paths are called on the Rust tokenizer directly."""
        self._rust: Any = backend.backend_tokenizer
        self._rust.no_truncation()
        self._rust.no_padding()
        added = cast(dict[int, Any], self._rust.get_added_tokens_decoder())
        self._special = frozenset(i for i, token in added.items() if token.special)
        num_ids = 1 + max(cast(dict[str, int], self._rust.get_vocab(with_added_tokens=True)).values(), default=0)
        self.vocab_size = settings.vocab_size or num_ids
        self._num_ids = num_ids
        self._may_exceed = num_ids > self.vocab_size
        own = backend.eos_token_id
        stops = {*settings.stop_token_ids, *([own] if isinstance(own, int) else [])}
        self.stop_token_ids = tuple(sorted(i for i in stops if 0 <= i < self.vocab_size))
        self.generation_defaults: Mapping[str, float | int] = MappingProxyType(settings.generation_defaults)
        self.chat_template = chat_template
        self._control = ControlTokens(self._rust)
        self._scheme = byte_scheme(self._rust.decoder)
        if self._scheme is not None:
            piece_of = self._rust.id_to_token
            self._all_bytes = TokenBytes(piece_of, self._scheme.to_bytes)
            self._plain_bytes = TokenBytes(piece_of, self._scheme.to_bytes, self._special)

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Load a model folder's tokenizer; blocks for about a second.

        Args:
            folder: has tokenizer.json; the other files are optional.
            chat_template: a Jinja file, or the template itself, in place of the model's.

        Raises:
            ModelLoadError: files are missing or damaged, or the chat template has a syntax error.
        """
        settings = read_settings(folder)
        backend = load_backend(folder)
        templates = backend.chat_template if chat_template is None else _read_template(chat_template)
        template = ChatTemplate(templates, backend.special_tokens_map) if templates else None
        return cls(backend, settings, template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; equal to ``tokenizer(text)`` of transformers. Releases the GIL.

        Raises:
            InvalidRequestError: the text holds half a surrogate pair, or a token that the model does not have.
        """
        return self._encode(text, add_special_tokens, "prompt")

    def encode_chat(
        self, messages: Sequence[Any], /, *, allow_control_tokens: bool = False, **template_options: Any
    ) -> list[int]:
        """Return the ids of a chat prompt; equal to ``apply_chat_template`` of transformers for ordinary messages.

        A control token written out in a message stays text, unless ``allow_control_tokens`` is set.

        Args:
            messages: as in the OpenAI API.
            template_options: ``tools``, ``add_generation_prompt`` (default true), variables of the template.

        Raises:
            InvalidRequestError: as ``encode``; the template refuses the messages; an option has a reserved name; the
                model has no template.
        """
        if self.chat_template is None:
            raise InvalidRequestError(NO_TEMPLATE, param="messages")
        if allow_control_tokens:
            return self._encode(self.chat_template.render(messages, **template_options), False, "messages")
        hiding = self._control.hiding()
        text = self.chat_template.render(messages, hiding, **template_options)
        return self._encode(text, False, "messages", hiding)

    def encode_input(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        max_tokens: int | None = None,
        param: str = "input",
    ) -> tuple[list[int], int]:
        """Return the ids of a text or a pair of texts, and at which the second one begins (0: nothing tells).

        Equal to transformers' ``tokenizer(text, pair, truncation=True, max_length=max_tokens)``: what is too long loses
        its end, the longer of two texts first, and special tokens stay.

        Raises:
            InvalidRequestError: as ``encode``; or ``max_tokens`` leaves no room for anything but special tokens.
        """
        with _refusing(param):
            if max_tokens is None:
                whole = tuple(texts) if len(texts) > 1 else texts[0]
                encoding = self._rust.encode_batch([whole], add_special_tokens=add_special_tokens)[0]
            else:
                encoding = self._cut(texts, add_special_tokens, max_tokens)
        ids = cast(list[int], encoding.ids)
        self._check_known(ids, param)
        types = cast(list[int], encoding.type_ids)
        return ids, types.index(1) if len(texts) > 1 and 1 in types else 0

    def _cut(self, texts: Sequence[str], special: bool, max_tokens: int) -> Any:
        parts = self._rust.encode_batch(list(texts), add_special_tokens=False)
        room = max_tokens - (self._rust.num_special_tokens_to_add(len(parts) > 1) if special else 0)
        if room < len(parts):
            raise InvalidRequestError(
                f"'truncate_prompt_tokens' {max_tokens} leaves no room beside special tokens",
                param="truncate_prompt_tokens",
            )
        for part, length in zip(parts, cut_lengths([len(part.ids) for part in parts], room), strict=True):
            part.truncate(length)
        return self._rust.post_process(*parts, add_special_tokens=special)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; equal to pushing them through a detokenizer."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, special tokens included; empty for an id without a token."""
        if self._scheme is not None:
            return self._all_bytes[token_id]
        return self._decode([token_id], skip_special_tokens=False).encode() if token_id >= 0 else b""

    @property
    def num_ids(self) -> int:
        """Ids in ``[0, num_ids)`` have tokens or belong to the model's vocabulary."""
        return max(self._num_ids, self.vocab_size)

    @property
    def has_bytes(self) -> bool:
        """Whether each token has bytes of its own, so that a text's tokens can be told one by one."""
        return self._scheme is not None

    @property
    def strips(self) -> bool:
        """Whether a text loses a space that it begins with."""
        return self._scheme is not None and self._scheme.strip > 0

    def stripped_ids(self) -> list[int]:
        """Return the ids whose first character is lost at the beginning of a text; 0.1 s for 32,000 tokens."""
        assert self._scheme is not None
        lost = self._scheme.strip_character.encode()
        return [i for i in range(self.vocab_size) if self._all_bytes[i].startswith(lost)]

    def serialised(self) -> str:
        """Return the text of tokenizer.json; 0.1 s for 262,144 tokens."""
        return cast(str, self._rust.to_str())

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a fresh detokenizer for one sequence."""
        if self._scheme is not None:
            table = self._plain_bytes if skip_special_tokens else self._all_bytes
            return ByteDetokenizer(table, self._scheme.strip, self._scheme.strip_character)
        return WindowDetokenizer(self._decode, self._special if skip_special_tokens else ())

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return cast(str, self._rust.decode(ids, skip_special_tokens=skip_special_tokens))

    def _encode(self, text: str, special: bool, param: str, hiding: Hiding | None = None) -> list[int]:
        """Encode, with the special tokens that the tokenizer adds or without; ``hiding`` holds what is not in text."""
        ids: list[int] = []
        with _refusing(param):
            if hiding is None or not hiding.found:
                # the plain encode() keeps the GIL: half a second for a text of 500,000 characters
                ids = cast(list[int], self._rust.encode_batch([text], add_special_tokens=special)[0].ids)
            if hiding is not None and (hiding.found or self._control.assembled(text, ids)):
                ids = self._control.encode(text, hiding, param)
        self._check_known(ids, param)
        return ids

    def _check_known(self, ids: list[int], param: str) -> None:
        if self._may_exceed and ids and max(ids) >= self.vocab_size:
            token = self._rust.id_to_token(max(ids))
            raise InvalidRequestError(f"{param} holds the token {token!r}, which the model does not have", param=param)


def cut_lengths(lengths: Sequence[int], room: int) -> list[int]:
    """How much of one or two texts is kept in ``room`` tokens: the longer one is cut until both are equally long."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    shorter = min(*lengths, room // 2)
    return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]


@contextmanager
def _refusing(param: str) -> Generator[None]:
    """What the Rust tokenizer raises, as InvalidRequestError."""
    try:
        yield
    except InvalidRequestError:
        raise
    except TypeError as error:  # the text has no UTF-8 form
        raise InvalidRequestError(
            f"{param} holds half of a surrogate pair, which is no character", param=param
        ) from error
    except Exception as error:  # the crate raises bare ones, for example without a token for unknown text
        raise InvalidRequestError(f"{param} cannot be tokenized: {error}", param=param) from error


def _read_template(source: str) -> str:
    """Read a file, or take the text itself when it looks like a template."""
    if "{" in source or "\n" in source:
        return source
    path = Path(source).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(
            f"the chat template {source} cannot be read, and is no Jinja text itself: {error}"
        ) from error
