"""A timeline as an SVG picture: three panels, a line per run. No library: a polyline is a list of points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from aserve.simulate.timeline import Timeline

_WIDTH, _PANEL, _LEFT, _GAP = 900, 130, 70, 40
_POINTS = 400
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")


def draw(timelines: Mapping[str, Timeline]) -> str:
    """The picture of runs under the titles given; every run has the same time axis."""
    end_s = max(timeline.times_s[-1] for timeline in timelines.values())
    columns = {title: timeline.columns(_POINTS, end_s=end_s) for title, timeline in timelines.items()}
    parts: list[str] = []
    for number, (name, field, form) in enumerate(
        (("running", "running", "{:.0f}"), ("waiting", "waiting", "{:.0f}"), ("KV use", "kv_use", "{:.0%}"))
    ):
        series = {title: [float(getattr(c, field)) for c in cells] for title, cells in columns.items()}
        parts.append(_panel(_GAP + number * (_PANEL + _GAP), name, series, form))
    bottom = _GAP + 3 * (_PANEL + _GAP)
    parts.append(_text(_LEFT, bottom - _GAP + 16, "0 s"))
    parts.append(_text(_LEFT + _WIDTH - 60, bottom - _GAP + 16, f"{end_s:.4g} s"))
    for number, title in enumerate(timelines):
        if title:
            parts.append(_text(_LEFT + number * 200, 20, title, _COLOURS[number % len(_COLOURS)]))
    size = f'width="{_LEFT + _WIDTH + 20}" height="{bottom + 10}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n' + (
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(top: int, name: str, series: Mapping[str, Sequence[float]], form: str) -> str:
    most = max(1e-9, *(value for values in series.values() for value in values))
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_PANEL}" fill="none" stroke="#ccc"/>',
        _text(5, top + 12, name),
        _text(5, top + 28, form.format(most)),
    ]
    for number, values in enumerate(series.values()):
        points = " ".join(
            f"{_LEFT + index * _WIDTH / (len(values) - 1):.1f},{top + _PANEL * (1 - value / most):.1f}"
            for index, value in enumerate(values)
        )
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return "\n".join(parts)


def _text(x: int, y: int, text: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{escape(text)}</text>'
