"""A hook of mkdocs: names of code blocks lose the words that only say how a block is tested."""

import re
from typing import Any

#: "```console run", "```text file=questions.txt" -> the language, as far as mkdocs knows it.
FENCE = re.compile(r"^(?P<fence> *```\w+) .*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return FENCE.sub(r"\g<fence>", markdown)
