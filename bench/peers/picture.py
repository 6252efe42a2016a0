"""The medians as a picture: one panel for each comparison, one bar for each server, ours in colour. Plain SVG."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.sax.saxutils import escape

from .report import HEADLINES, OURS, Headline

_WIDTH, _PANEL, _COLUMNS = 1000, 320, 3
_BAR, _GAP, _TOP = 18, 6, 64
_LABEL = 120
_INK, _FAINT, _OURS, _OTHERS = "#1f2933", "#6b7785", "#0f7b6c", "#b8c1cc"
_SHOWN = (
    "start.first_token_s", "concurrency_1.output_tokens_per_s", "concurrency_8.output_tokens_per_s",
    "concurrency_64.output_tokens_per_s", "prompts_512.prompt_tokens_per_s", "prompts_2000.prompt_tokens_per_s",
    "shared_prefix.miss_ms", "shared_prefix.hit_ms", "mix.first_token_p50_ms", "mix.first_token_p99_ms",
    "mix.between_p50_ms", "mix.between_p99_ms",
)  # fmt: skip


def picture(result: Mapping[str, Any]) -> str:
    """The whole document. Panels without any figure are left out."""
    names = list(result["medians"])
    shown = [
        headline
        for headline in HEADLINES
        if f"{headline.workload}.{headline.figure}" in _SHOWN
        and any(headline.of(result["medians"][name]) is not None for name in names)
    ]
    panel_height = 34 + len(names) * (_BAR + _GAP)
    height = _TOP + -(-len(shown) // _COLUMNS) * (panel_height + 14) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(20, 28, f"{result['model']['checkpoint']}: serving through the OpenAI API", 17, _INK, bold=True),
        _text(20, 48, _subtitle(result), 12, _FAINT),
    ]
    for index, headline in enumerate(shown):
        x = 20 + index % _COLUMNS * _PANEL
        y = _TOP + index // _COLUMNS * (panel_height + 14)
        parts += _panel(headline, result["medians"], x, y)
    return "\n".join([*parts, "</svg>\n"])


def _subtitle(result: Mapping[str, Any]) -> str:
    found = result["machine"]
    return f"{found['cpu']}, {found['cores']} cores; medians of {len(result['rounds'])} rounds"


def _panel(headline: Headline, found: Mapping[str, Any], x: int, y: int) -> list[str]:
    values = {name: headline.of(figures) for name, figures in found.items()}
    largest = max(value for value in values.values() if value is not None)
    direction = "more is better" if headline.more_is_better else "less is better"
    parts = [_text(x, y + 14, headline.title, 13, _INK, bold=True), _text(x, y + 28, direction, 10, _FAINT)]
    room = _PANEL - _LABEL - 80
    for row, (name, value) in enumerate(values.items()):
        top = y + 34 + row * (_BAR + _GAP)
        parts.append(_text(x, top + 13, name, 11, _INK, bold=name == OURS))
        if value is None:
            parts.append(_text(x + _LABEL, top + 13, "no figure", 11, _FAINT))
            continue
        width = max(1.0, room * value / largest)
        colour = _OURS if name == OURS else _OTHERS
        parts.append(f'<rect x="{x + _LABEL}" y="{top}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{colour}"/>')
        parts.append(
            _text(x + _LABEL + width + 5, top + 13, f"{value:,.4g}" if value < 1000 else f"{value:,.0f}", 11, _INK)
        )
    return parts


def _text(x: float, y: float, words: str, size: int, colour: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}"{weight}>{escape(words)}</text>'
