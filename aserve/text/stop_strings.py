"""Stop strings, matched across token borders.

Text that could still become a stop string is held back, everything else passes at once. The match that ends first
wins; of those that end together, the longest. The result does not depend on how the text was cut into pieces.
Pure; one matcher per choice, driven by the engine's generation after its detokenizer.
"""

from __future__ import annotations


def _failure_table(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: for each length of a match, the longest shorter beginning that is also its end."""
    table = [0] * (len(pattern) + 1)
    length = 0
    for n in range(1, len(pattern)):
        while length and pattern[n] != pattern[length]:
            length = table[length]
        length += pattern[n] == pattern[length]
        table[n + 1] = length
    return table


class StopMatcher:
    """Finds the first of some stop strings in text that comes in pieces; O(1) per character and stop string.

    ``stop`` must not hold empty strings. ``include`` keeps the matched string in the text.
    """

    __slots__ = ("_first", "_held", "_include", "_matched", "_patterns", "_states")

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string must not be empty")
        self._patterns = [(pattern, _failure_table(pattern)) for pattern in stop]
        self._first = {pattern[0] for pattern in stop}
        self._include = include
        self._states = [0] * len(stop)  # how much of each pattern the text so far ends with
        self._held = ""
        self._matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may be shown, and whether a stop string was found.

        After a match the text is cut before the stop string (after it with ``include``) and nothing more comes.
        """
        if self._matched:
            return "", True
        if not self._held and self._first.isdisjoint(text):
            return text, False
        whole = self._held + text
        start = len(self._held)
        for n in range(start, len(whole)):
            longest = self._advance(whole[n])
            if longest:
                self._matched = True
                self._held = ""
                return whole[: n + 1 if self._include else n + 1 - longest], True
        shown = len(whole) - max(self._states)
        self._held = whole[shown:]
        return whole[:shown], False

    def finish(self) -> str:
        """Return what was held back for a match that never came."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Step every pattern by one character; return the length of the longest that is now complete, or 0."""
        longest = 0
        for index, (pattern, failure) in enumerate(self._patterns):
            state = self._states[index]
            while state and pattern[state] != character:
                state = failure[state]
            state += pattern[state] == character
            if state == len(pattern):
                longest = max(longest, state)
            self._states[index] = state
        return longest
