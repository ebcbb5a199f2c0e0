"""The code blocks of a page of documentation; CONTRIBUTING.md tells how each kind is tested."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

#: A comment right before a block, which says how the block is tested.
DIRECTIVE = re.compile(r"<!--\s*test:\s*(?P<text>.+?)\s*-->")

#: A block whose first line is such a comment is a file of that name.
FILE_LINE = re.compile(r"#\s*(?P<name>[\w./-]+\.\w+)\s*")

#: What may stand in a directive: a word, then the word's own text.
DIRECTIVES = ("run", "start", "needs", "file")


class BadPage(Exception):
    """A page breaks the convention; the text says where and how."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced code block.

    Attributes:
        line: Of its first line of code, counted from 1 in the page.
        directive: One of `DIRECTIVES`, or empty.
        argument: What stands behind it.
    """

    page: Path
    line: int
    language: str
    code: str
    directive: str = ""
    argument: str = ""

    @property
    def place(self) -> str:
        """Where it is, as an editor can follow it."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file that the block is; empty where it is none."""
        if self.directive == "file":
            return self.argument
        first = FILE_LINE.fullmatch(self.code.partition("\n")[0])
        return first["name"] if first else ""


def read_blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in order.

    Raises:
        BadPage: A block has no language, is not fenced, or has an unknown directive.
    """
    blocks: list[Block] = []
    directive = ""
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block" and (found := DIRECTIVE.search(token.content)):
            directive = found["text"]
            continue
        line = (token.map or [0])[0] + 2
        if token.type == "code_block":
            raise BadPage(f"{page}:{line - 1}: an indented block; fence it and name its language")
        if token.type == "fence":
            blocks.append(_block(page, line, token.info, token.content, directive))
        elif directive:
            raise BadPage(f"{page}:{line}: 'test: {directive}' does not stand before a code block")
        directive = ""
    return blocks


def _block(page: Path, line: int, info: str, code: str, directive: str) -> Block:
    word, _, argument = directive.partition(" ")
    if word and word not in DIRECTIVES:
        raise BadPage(f"{page}:{line}: directive {word!r}; there are {', '.join(DIRECTIVES)}")
    if not info.strip():
        raise BadPage(f"{page}:{line}: a block without a language; say ```text if it has none")
    return Block(page, line, info.split()[0], code, word, argument.strip())


@dataclass(frozen=True, slots=True)
class Command:
    """One command line of a shell block.

    Attributes:
        text: As it would be typed.
        output: What the page shows as its output; only in `console` blocks.
    """

    line: int
    text: str
    output: str = ""


def read_commands(block: Block) -> list[Command]:
    """The commands of a `bash` or `console` block; comments and empty lines left out."""
    commands: list[Command] = []
    pending = ""
    for number, raw in enumerate(block.code.splitlines(), block.line):
        line = raw
        if block.language == "console" and not pending:
            if not raw.startswith("$ "):
                if not commands:
                    raise BadPage(f"{block.page}:{number}: a console block starts with '$ '")
                last = commands[-1]
                commands[-1] = Command(last.line, last.text, f"{last.output}{raw}\n")
                continue
            line = raw.removeprefix("$ ")
        text = pending + line.strip()
        pending = text.removesuffix("\\") if text.endswith("\\") else ""
        if not pending and text and not text.startswith("#"):
            commands.append(Command(number, text))
    return commands


def simple_commands(text: str) -> list[list[str]]:
    """Cuts a command line at `&&`, `|`, `;` and `&`; leaves out assignments and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if set(word) <= set("<>"):
            next(words, None)
        elif set(word) <= set("();|&"):
            found.append([])
        elif found[-1] or not re.fullmatch(r"\w+=.*", word):
            found[-1].append(word)
    return [command for command in found if command]
