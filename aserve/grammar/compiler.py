"""Compiles grammars for one tokenizer and keeps the ones used lately.

``compile`` blocks and belongs in a worker thread; ``find`` may be called from any. A compiled grammar stays findable
for as long as somebody holds it, whatever the cache has let go of, so that the step thread never has to compile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from aserve.core.errors import InvalidGrammarError
from aserve.core.grammar import Grammar
from aserve.grammar.source import explain, to_native


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a compiler needs to know of a tokenizer.

    Attributes:
        serialised: makes the text of tokenizer.json; None if its tokens have no bytes of their own, so that no grammar
            can be kept to.
        num_ids: ids in ``[0, num_ids)`` have tokens.
        end_token_ids: the model's end-of-text ids.
        stripped_ids: tells the tokens whose first character is lost at the beginning of a text; None if none is.
    """

    serialised: Callable[[], str] | None
    num_ids: int
    end_token_ids: tuple[int, ...]
    stripped_ids: Callable[[], Sequence[int]] | None = None


class CompiledGrammar:
    """A grammar that matchers start from; immutable."""

    def __init__(self, native: LLMatcher) -> None:
        self._native = native

    def start(self) -> LLMatcher:
        """Return a matcher at the beginning; takes 0.01 to 0.3 ms."""
        return self._native.deep_copy()


class GrammarCompiler:
    """The grammars of one model.

    Attributes:
        end_token_ids: the model's end-of-text ids.
        num_words: 32-bit words of a mask with a bit per token.
        not_first: ids that no text within a grammar begins with, as the text would lose their first character.
    """

    def __init__(self, vocabulary: Vocabulary, *, size: int) -> None:
        """``size`` is how many grammars are kept though nobody uses them."""
        self.end_token_ids = vocabulary.end_token_ids
        self.num_words = -(-vocabulary.num_ids // 32)
        self.not_first: Sequence[int] = ()
        self._vocabulary = vocabulary
        self._size = size
        self._limits = LLParserLimits(verbose_errors=False)
        self._lock = Lock()
        self._tokenizer_lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._alive: WeakValueDictionary[Grammar, CompiledGrammar] = WeakValueDictionary()
        self._recent: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return it if it is compiled and still there."""
        with self._lock:
            compiled = self._alive.get(grammar)
            if compiled is not None:
                self._note(grammar, compiled)
            return compiled

    def warm_up(self) -> None:
        """Read the vocabulary, unless it has been; takes 0.3 s for 49,152 tokens, 4 s for 262,144.

        Raises InvalidGrammarError if the tokenizer cannot be used.
        """
        with self._tokenizer_lock:
            if self._tokenizer is None:
                if self._vocabulary.stripped_ids is not None:
                    self.not_first = self._vocabulary.stripped_ids()
                self._tokenizer = self._read_vocabulary()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile, or return what is there. Blocks, without the GIL; needs up to 4 kB of stack per reference.

        Raises InvalidGrammarError, which says what is wrong.
        """
        found = self.find(grammar)
        if found is not None:
            return found
        native_source = to_native(grammar)
        self.warm_up()
        assert self._tokenizer is not None, "it has been read"
        native = LLMatcher(self._tokenizer, native_source, log_level=0, limits=self._limits)
        if native.is_error():
            raise InvalidGrammarError(f"the grammar cannot be used: {explain(native.get_error())}")
        return self._keep(grammar, CompiledGrammar(native))

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> CompiledGrammar:
        with self._lock:
            compiled = self._alive.setdefault(grammar, compiled)
            self._note(grammar, compiled)
            return compiled

    def _note(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Count as used just now; the lock is held."""
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        while len(self._recent) > self._size:
            self._recent.popitem(last=False)

    def _read_vocabulary(self) -> LLTokenizer:
        vocabulary = self._vocabulary
        if vocabulary.serialised is None or not vocabulary.end_token_ids:
            raise InvalidGrammarError("this model's tokenizer does not allow answers within a grammar")
        try:
            return LLTokenizer(
                vocabulary.serialised(), n_vocab=vocabulary.num_ids, eos_token=list(vocabulary.end_token_ids)
            )
        except ValueError as error:
            raise InvalidGrammarError(
                f"this model's tokenizer does not allow answers within a grammar: {explain(str(error))}"
            ) from error
