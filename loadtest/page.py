"""The HTML around plots and tables: one file, no script, nothing loaded, light and dark. Escapes what it is given."""

from collections.abc import Sequence
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f5; --card: #ffffff; --line: #d5dedb; --grid: #e6ecea; --ink: #17211f; --soft: #566863;
  --accent: #0c7468; --bad: #b3261e; --warn: #93620a; --sunk: #eef2f0;
  --c0: #0c7468; --c1: #b4530a; --c2: #3b5fc0; --c3: #a23b72; --c4: #6b7a1e; --c5: #5c5470;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1514; --card: #161e1d; --line: #2b3836; --grid: #222d2b; --ink: #e3ebe9; --soft: #93a5a1;
    --accent: #56c9b8; --bad: #ff8a80; --warn: #e5b15b; --sunk: #1d2726;
    --c0: #56c9b8; --c1: #f0a35e; --c2: #8eb0ff; --c3: #ee8fc0; --c4: #c3d16a; --c5: #b9aedb;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 24px; letter-spacing: -.015em; margin: 0; }
h2 { font-size: 18px; margin: 36px 0 12px; letter-spacing: -.01em; }
h3 { font-size: 15px; margin: 0 0 8px; }
p { margin: 6px 0; max-width: 78ch; }
.soft, .note { color: var(--soft); }
.note { font-size: 13.5px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(158px, 1fr)); gap: 12px; margin: 20px 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.tile b { display: block; font-size: 23px; font-weight: 640; letter-spacing: -.02em; line-height: 1.25; }
.tile span { color: var(--soft); font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 14px;
  margin: 14px 0; }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 14px 8px; }
figcaption { font-weight: 600; margin: 0 4px 6px; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .strong { fill: var(--ink); }
.grid { stroke: var(--grid); fill: none; }
.axis { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.mark { stroke: var(--ink); stroke-dasharray: 2 3; fill: none; opacity: .6; }
.lone { max-width: 760px; margin: 14px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 2px 8px 6px; font-size: 13px; color: var(--soft); }
.key::before { content: ""; display: inline-block; width: 18px; border-top: 3px solid var(--key);
  margin-right: 7px; vertical-align: middle; }
.key.dashed::before { border-top-style: dashed; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 550; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.warning { border: 1px solid var(--warn); border-left-width: 5px; border-radius: 8px; padding: 10px 14px;
  margin: 16px 0; background: var(--card); }
.bad { color: var(--bad); }
details { margin: 12px 0; } summary { cursor: pointer; font-weight: 600; padding: 6px 0; }
@media print { body { background: #fff; } .card, figure, .tile { break-inside: avoid; } }
"""


def page(title: str, body: str) -> str:
    """A whole document; `body` is HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Figures in large type: (value, what it is)."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in entries
    )
    return f'<div class="tiles">{inner}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A card with a table; the columns `texts` hold sentences, the others figures."""
    top = "".join(
        f"<th{' class=text' if i in texts else ''}>{escape(cell)}</th>" for i, cell in enumerate(head)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=text' if i in texts else ''}>{escape(cell)}</td>" for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def plots(figures: Sequence[str]) -> str:
    """Figures side by side where there is room."""
    return f'<div class="plots">{"".join(figures)}</div>'


def plot(figure: str) -> str:
    """One figure by itself, not larger than two would be."""
    return f'<div class="lone">{figure}</div>'


def warning(text: str) -> str:
    """A sentence that must not be overlooked."""
    return f'<p class="warning">{escape(text)}</p>'


def note(text: str) -> str:
    """A sentence in small type."""
    return f'<p class="note">{escape(text)}</p>'
