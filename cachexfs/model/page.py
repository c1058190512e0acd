"""The report's page: style and frame.

Role: static HTML and CSS of ``report``; light and dark, printable, no script, no request to anywhere.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

STYLE = """
:root{--ink:#1c2330;--soft:#5b6575;--page:#fbfbfa;--card:#fff;--rule:#dfe3e8;--a:#1f5fbf;--b:#c2571a;
  --c:#2f8f5b;--warn:#8a5a00;--warnbg:#fff4dc}
@media(prefers-color-scheme:dark){:root{--ink:#e7eaf0;--soft:#9aa5b5;--page:#14181f;--card:#1b212b;
  --rule:#313a47;--a:#74a9ff;--b:#ff9d5c;--c:#6fd09b;--warn:#ffd27d;--warnbg:#33290f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:760px;margin:0 auto;padding:28px 16px 60px}
h1{font-size:26px;margin:0 0 4px}
h2{font-size:19px;margin:34px 0 6px}
p{margin:6px 0 10px}
.soft{color:var(--soft)}
.advice{background:var(--card);border:1px solid var(--rule);border-left:4px solid var(--a);padding:10px 16px;
  margin:18px 0;border-radius:6px}
.advice p{margin:6px 0}
.warn{background:var(--warnbg);border:1px solid var(--warn);color:var(--warn);padding:10px 16px;
  border-radius:6px;margin:14px 0}
.warn ul{margin:4px 0 4px 18px;padding:0}
figure{margin:10px 0;background:var(--card);border:1px solid var(--rule);border-radius:6px;
  padding:10px 8px 8px}
svg{display:block;width:100%;height:auto}
figcaption{font-size:14px;color:var(--soft);padding:4px 8px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;padding:2px 8px;color:var(--soft)}
.key{display:inline-block;width:18px;height:10px;margin-right:6px;border-radius:2px;vertical-align:-1px}
table{border-collapse:collapse;width:100%;font-size:14px;margin:8px 0;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 8px;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:var(--soft)}
.wide{overflow-x:auto}
.grid{stroke:var(--rule);stroke-width:1}
.tick{font-size:11.5px;fill:var(--soft)}
.axis{font-size:12.5px;fill:var(--soft)}
.note{font-size:12px;fill:var(--ink)}
polyline{fill:none;stroke-width:2}
polyline.la{stroke:var(--a)}
polyline.lb{stroke:var(--b)}
polyline.lc{stroke:var(--c)}
polyline.ld{stroke:var(--soft);stroke-dasharray:5 4}
polygon.w80,rect.w80{fill:var(--a);opacity:.24}
polygon.w95,rect.w95{fill:var(--a);opacity:.11}
g.pa circle{fill:var(--a)}
g.pb circle{fill:var(--b)}
g.pc circle{fill:var(--c)}
g.pg circle{fill:var(--soft);opacity:.55}
rect.ba{fill:var(--a);opacity:.75}
rect.bb{fill:var(--b);opacity:.75}
rect.bc{fill:var(--c);opacity:.75}
rect.bg{fill:var(--soft);opacity:.35}
rect.shade{fill:var(--soft);opacity:.08}
line.mark{stroke:var(--b);stroke-width:1.5;stroke-dasharray:4 3}
line.mark2{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:2 3}
i.la,i.pa,i.ba{background:var(--a)}
i.lb,i.pb,i.bb{background:var(--b)}
i.lc,i.pc,i.bc{background:var(--c)}
i.ld,i.pg,i.bg{background:var(--soft)}
i.w80{background:var(--a);opacity:.35}
i.w95{background:var(--a);opacity:.16}
i.shade{background:var(--soft);opacity:.2}
"""


def frame(title: str, body: str) -> str:
    """The whole document."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what belongs to it."""
    return f"<h2>{html.escape(title)}</h2>" + "".join(parts)


def paragraph(text: str, css: str = "") -> str:
    """A paragraph."""
    kind = f' class="{css}"' if css else ""
    return f"<p{kind}>{html.escape(text)}</p>"


def figure(chart: str, caption: str) -> str:
    """A chart and what it says."""
    return f"<figure>{chart}<figcaption>{html.escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is text."""
    top = "".join(f"<th>{html.escape(c)}</th>" for c in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def warning(title: str, reasons: Sequence[str]) -> str:
    """A box that cannot be missed."""
    items = "".join(f"<li>{html.escape(r)}</li>" for r in reasons)
    return f'<div class="warn"><b>{html.escape(title)}</b><ul>{items}</ul></div>'
