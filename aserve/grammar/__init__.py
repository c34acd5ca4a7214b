"""Grammars: compiled for a tokenizer, walked token by token, and the tokens that each allows next.

The one package that knows llguidance. The async half compiles, the step thread matches; both import it, so it knows
neither torch nor an event loop.
"""

from aserve.grammar.compiler import CompiledGrammar, GrammarCompiler, Vocabulary
from aserve.grammar.matcher import Matcher, Verdict
from aserve.grammar.slots import GrammarSlots, Settlement, settle

__all__ = [
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarSlots",
    "Matcher",
    "Settlement",
    "Verdict",
    "Vocabulary",
    "settle",
]
