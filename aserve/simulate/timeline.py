"""What a simulation looked like over time, as samples, as columns of equal time, and as blocks of characters."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LEVELS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 4


class Column(NamedTuple):
    """The most that was seen in one stretch of time."""

    running: float
    waiting: float
    kv_use: float


@dataclass(slots=True)
class Timeline:
    """A sample per step: sequences running and waiting, and the share of the KV cache in use."""

    times_s: array[float] = field(default_factory=lambda: array("d"))
    running: array[int] = field(default_factory=lambda: array("q"))
    waiting: array[int] = field(default_factory=lambda: array("q"))
    kv_use: array[float] = field(default_factory=lambda: array("d"))

    def add(self, time_s: float, running: int, waiting: int, kv_use: float) -> None:
        self.times_s.append(time_s)
        self.running.append(running)
        self.waiting.append(waiting)
        self.kv_use.append(kv_use)

    def columns(self, count: int, *, end_s: float | None = None) -> list[Column]:
        """The samples in ``count`` stretches of equal time; a stretch without a sample is like the one before.

        With an ``end_s`` that is later than the last sample, the stretches behind it are empty.
        """
        columns: list[Column] = []
        position = 0
        last_s = self.times_s[-1] if self.times_s else 0.0
        end_s = last_s if end_s is None else end_s
        for number in range(1, count + 1):
            start = position
            while position < len(self.times_s) and self.times_s[position] <= end_s * number / count:
                position += 1
            if position > start:
                part = slice(start, position)
                columns.append(Column(max(self.running[part]), max(self.waiting[part]), max(self.kv_use[part])))
            else:
                is_over = end_s * (number - 1) / count > last_s
                columns.append(columns[-1] if columns and not is_over else Column(0, 0, 0))
        return columns


def plot(timeline: Timeline, width: int) -> str:
    """Three panels of block characters, ``width`` columns wide beside the labels."""
    columns = timeline.columns(width)
    end = f"{timeline.times_s[-1]:.4g} s" if timeline.times_s else "0 s"
    lines: list[str] = []
    panels = (
        ("running", [c.running for c in columns], "{:.0f}", 0.0),
        ("waiting", [c.waiting for c in columns], "{:.0f}", 0.0),
        ("KV use", [c.kv_use for c in columns], "{:.0%}", 1.0),
    )
    for name, values, form, least in panels:
        top = max(least, *values)
        labels = [form.format(top), *[""] * (_HEIGHT - 2), form.format(0)]
        names = [name, *[""] * (_HEIGHT - 1)]
        for row, label, cells in zip(names, labels, _rows(values, top), strict=True):
            lines.append(f"{row:8}{label:>6} ┤{cells}")
    lines.append(f"{'':15}└{'0 s':{max(1, width - len(end))}}{end}")
    return "\n".join(lines)


def _rows(values: Sequence[float], top: float) -> Iterator[str]:
    """Bars of ``_HEIGHT`` lines, the top one first; what is not quite nothing shows."""
    steps = len(_LEVELS) - 1
    heights = [-(-value * _HEIGHT * steps // top) if top else 0 for value in values]
    for line in reversed(range(_HEIGHT)):
        yield "".join(_LEVELS[int(min(steps, max(0, height - line * steps)))] for height in heights)
