"""A report's blocks as Markdown, as one self-contained HTML page, and a table as plain text."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } thead th { border-bottom: 2px solid #444 }
div.table { overflow-x: auto } img { max-width: 100%; height: auto } figcaption { font-size: 13px; color: #555 }
figure { margin: 1.5rem 0 } h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }"""


@dataclasses.dataclass
class Block:
    """One piece of a report: a heading, a paragraph, a list, a table or a plot."""

    kind: str
    text: str = ""
    items: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()  # the first is the header
    path: Path | None = None


def to_markdown(blocks: Sequence[Block], root: Path) -> str:
    parts = []
    for block in blocks:
        if block.kind in ("title", "heading"):
            parts.append(f"{'#' if block.kind == 'title' else '##'} {block.text}")
        elif block.kind == "list":
            parts.append("\n".join(f"- {item}" for item in block.items))
        elif block.kind == "table":
            lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in block.rows]
            rule = "|" + "|".join([":--"] + ["--:"] * (len(block.rows[0]) - 1)) + "|"
            parts.append("\n".join([lines[0], rule, *lines[1:]]))
        elif block.path is not None:
            parts.append(f"![{block.text}]({block.path.relative_to(root)})\n\n{block.text}")
        else:
            parts.append(block.text)
    return "\n\n".join(parts) + "\n"


def to_html(title: str, blocks: Sequence[Block]) -> str:
    parts = []
    for block in blocks:
        text = html.escape(block.text)
        if block.kind in ("title", "heading"):
            tag = "h1" if block.kind == "title" else "h2"
            parts.append(f"<{tag}>{text}</{tag}>")
        elif block.kind == "list":
            parts.append("<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in block.items) + "</ul>")
        elif block.kind == "table":
            head, *body = ["".join(f"<TAG>{html.escape(cell)}</TAG>" for cell in row) for row in block.rows]
            lines = "".join(f"<tr>{row.replace('TAG>', 'td>')}</tr>\n" for row in body)
            head = head.replace("TAG>", "th>")
            parts.append(
                f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
            )
        elif block.path is not None:
            data = base64.b64encode(block.path.read_bytes()).decode()
            kind = block.path.suffix.removeprefix(".")  # png, gif
            picture = f'<img src="data:image/{kind};base64,{data}" alt="{text}">'
            parts.append(f"<figure>{picture}<figcaption>{text}</figcaption></figure>")
        else:
            parts.append(f"<p>{text}</p>")
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded with spaces, the first to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
