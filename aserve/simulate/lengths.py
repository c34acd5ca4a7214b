"""Lengths drawn from a distribution that fits into one word of a command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from aserve.core.errors import ConfigError

_MOST = 2**31
_MOST_SIGMA = 10
"""One standard deviation is a factor of e to this. With 700 a draw could be larger than any float."""
_FORMS = "write 512, uniform:10:200 (lowest, highest) or lognormal:300:0.8 (median, sigma), with :MAX behind it to cap"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers from 1.

    Attributes:
        kind: ``fixed``, ``uniform`` or ``lognormal``.
        values: the parameters of the kind.
        most: what is longer is cut to this.
    """

    kind: str
    values: tuple[float, float]
    most: int

    @classmethod
    def parse(cls, text: str, *, flag: str) -> Lengths:
        """Read ``512``, ``uniform:LOW:HIGH`` or ``lognormal:MEDIAN:SIGMA[:MAX]``. Raises ConfigError."""
        kind, *parts = text.split(":") if ":" in text else ("fixed", text)
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if not all(math.isfinite(number) for number in numbers):
            numbers = []
        most = _MOST
        if kind == "lognormal" and len(numbers) == 3:
            most = int(numbers.pop())
        low = numbers[0] if numbers else 0.0
        fits = {
            "fixed": len(numbers) == 1,
            "uniform": len(numbers) == 2 and numbers[-1] >= low,
            "lognormal": len(numbers) == 2 and 0 <= numbers[-1] <= _MOST_SIGMA,
        }
        if not fits.get(kind, False) or low < 1 or max(numbers) > _MOST or most < 1:
            raise ConfigError(f"{flag}: {text!r} is no length; {_FORMS}")
        return cls(kind, (numbers[0], numbers[-1]), most)

    def draw(self, random: Random) -> int:
        first, second = self.values
        if self.kind == "uniform":
            value: float = random.randint(int(first), int(second))
        elif self.kind == "lognormal":
            value = random.lognormvariate(math.log(first), second)
        else:
            value = first
        return max(1, min(self.most, round(value)))
