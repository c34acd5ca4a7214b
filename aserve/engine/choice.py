"""One choice of a request: its detokenizer, its stop matcher and what it has come to so far. Pure.

Turns token events into text deltas. The outcome does not depend on how events are grouped into batches: with stop
strings the tokens are taken one by one, and none after the match counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from aserve.core.request import FinishReason, TextDelta
from aserve.core.step import TokenEvent
from aserve.text.detokenizer import Detokenizer
from aserve.text.stop_strings import StopMatcher


class Choice:
    """State of one choice.

    The id that ends a choice through ``stop_token_ids`` counts as a completion token, but is neither text nor part of
    a delta's ``token_ids`` and ``logprobs``. A choice that ends by length, or because its grammar is complete, shows
    all its text.

    Attributes:
        finish_reason: set when the choice has ended, by its tokens or by a stop string.
        num_tokens: completion tokens, the ending stop token included.
        num_cached_tokens: prompt tokens found in the prefix cache when this choice first ran.
    """

    __slots__ = ("_detokenizer", "_matcher", "finish_reason", "index", "num_cached_tokens", "num_tokens")

    def __init__(self, index: int, detokenizer: Detokenizer, matcher: StopMatcher | None) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.num_cached_tokens = 0

    def push(self, events: Sequence[TokenEvent]) -> TextDelta:
        """Take the next events of this choice, at least one, in order. Not to be called after the end."""
        last = events[-1]
        reason = last.finish_reason
        self.num_cached_tokens = last.num_cached_tokens
        if reason is None and len(events) == 1:  # nearly always; at half the cost of the general way below
            token_ids = (last.token_id,)
            logprobs = () if last.logprobs is None else (last.logprobs,)
            self.num_tokens += 1
            text = self._detokenizer.push(token_ids)
            if self._matcher is not None:
                text, matched = self._matcher.push(text)
                if matched:
                    self.finish_reason = reason = FinishReason.STOP
            return TextDelta(self.index, text, token_ids, logprobs, reason, last.num_cached_tokens)
        shown = events[:-1] if reason is FinishReason.STOP and not last.completes else events
        if self._matcher is None:
            text = self._detokenizer.push([event.token_id for event in shown]) if shown else ""
            if reason is not None:
                text += self._detokenizer.finish()
            self.num_tokens += len(events)
        else:
            text, num_used, matched = self._push_matching(shown, self._matcher, ends=reason is not None)
            if matched:
                reason = FinishReason.STOP
                shown = shown[:num_used]
                self.num_tokens += min(num_used, len(events))
            else:
                self.num_tokens += len(events)
        self.finish_reason = reason
        return TextDelta(
            self.index,
            text,
            tuple([event.token_id for event in shown]),
            tuple([event.logprobs for event in shown if event.logprobs is not None]),
            reason,
            self.num_cached_tokens,
        )

    def _push_matching(
        self, events: Sequence[TokenEvent], matcher: StopMatcher, *, ends: bool
    ) -> tuple[str, int, bool]:
        """Returns the text that may be shown, how many events it took, and whether a stop string ended it.

        One more than there are if the match needed the end: the token that was the end was generated, too.
        """
        parts: list[str] = []
        for num_used, event in enumerate(events, start=1):
            text, matched = matcher.push(self._detokenizer.push((event.token_id,)))
            parts.append(text)
            if matched:
                return "".join(parts), num_used, True
        if ends:
            text, matched = matcher.push(self._detokenizer.finish())
            parts.append(text)
            if matched:
                return "".join(parts), len(events) + 1, True
            parts.append(matcher.finish())
        return "".join(parts), len(events), False
