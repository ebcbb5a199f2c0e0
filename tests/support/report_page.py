"""A report as a browser reads it: tables by id, and whatever would be loaded from elsewhere."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

#: Elements that load something, or run it.
LOADING = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}

#: Attributes that name something to be loaded.
REFERENCES = {"src", "href", "xlink:href", "data", "action", "srcset"}

#: Elements that have no end.
VOID = {"meta", "br"}


class ReportPage(HTMLParser):
    """Is parsed when it is made; elements must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        #: Id of a table -> its rows, each a list of cells.
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self.outside: list[str] = []
        self._open: list[str] = []
        self._table = ""
        source = path.read_text(encoding="utf-8")
        (svg,) = re.findall(r"<svg .*?</svg>", source, re.DOTALL)
        self.svg = ElementTree.fromstring(svg)
        self.feed(source)
        self.close()
        assert not self._open, self._open

    def rows(self, table: str) -> dict[str, list[str]]:
        """The rows of a table by their first cell."""
        return {first: rest for first, *rest in self.tables.get(table, [])}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.outside += [tag] if tag in LOADING else []
        self.outside += [
            f"{name}={value}"
            for name, value in attrs
            if (name in REFERENCES and not (value or "").startswith("#")) or name.startswith("on")
        ]
        if tag == "table":
            self._table = known.get("id") or ""
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[self._table][-1][-1] += data
