"""Checks commands of Batchery and Celery in the documentation without running them."""

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
from celery.bin.celery import celery
from packaging.requirements import Requirement

from batchery.cli.main import main as batchery


class BadCommand(Exception):
    """A command that the reader could not run as it stands; the text says why."""


def read_commands(language: str, code: str) -> list[tuple[str, str]]:
    """The commands of a `bash` or `console` block, each with the output that is shown.

    Raises:
        BadCommand: A `console` block does not begin with a prompt.
    """
    code = re.sub(r"\\\n\s*", "", code)
    if language == "bash":
        return [(line, "") for line in code.splitlines()]
    before, *commands = re.split(r"^\$ ", code, flags=re.MULTILINE)
    if before:
        raise BadCommand(f"{before!r}: a console block starts with '$ '")
    return [(line, output) for line, _, output in (each.partition("\n") for each in commands)]


def simple_commands(text: str) -> list[list[str]]:
    """Cuts a command line at `&&`, `|`, `;` and `&`; leaves out assignments and redirections."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
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


def check_commands(language: str, code: str) -> None:
    """Checks all commands of a `bash` or `console` block.

    Raises:
        BadCommand: Something in them does not exist.
    """
    for command, _ in read_commands(language, code):
        for words in simple_commands(command):
            check(words)


def check(command: list[str]) -> None:
    """Checks one simple command, if it is Batchery's, Celery's or an installation.

    Args:
        command: Its words.

    Raises:
        BadCommand: Something in it does not exist.
    """
    name, *arguments = command
    if name in ("batchery", "celery"):
        parse_click(batchery if name == "batchery" else celery, name, arguments)
    elif name in ("pip", "uv"):
        check_install(arguments)


def check_install(arguments: list[str]) -> None:
    """Raises `BadCommand` where `pip install` asks for an extra that this project has not."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(tomllib.loads(text)["project"]["optional-dependencies"])
    for word in arguments:
        # `.[extra]` is this project, too.
        name = re.sub(r"^\.(?=\[)", "batchery", word)
        if re.match(r"batchery\b", name) and (unknown := Requirement(name).extras - extras):
            raise BadCommand(f"pip: batchery has no extra {sorted(unknown)}")


def search_path() -> str:
    """PATH with the folder of this Python in front, as in an activated environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def parse_click(command: click.Command, name: str, arguments: list[str]) -> None:
    """Follows a click command to its subcommand; every option and choice must be known.

    Raises:
        BadCommand: A subcommand, an option or a choice does not exist, or one is missing.
    """
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        options, rest, _ = command.make_parser(context).parse_args(list(arguments))
        for parameter in command.params:
            value = options.get(parameter.name or "")
            if parameter.required and value is None and not options.get("help"):
                raise click.MissingParameter(ctx=context, param=parameter)
            # Celery's own kinds of choices load apps and pools when they are converted.
            if type(parameter.type) is click.Choice and isinstance(value, str):
                parameter.type.convert(value, parameter, context)
    except click.UsageError as error:
        raise BadCommand(f"{name}: {error.format_message()}") from None
    if not isinstance(command, click.Group) or not rest:
        return
    subcommand = command.get_command(context, rest[0])
    # Celery and Batchery put a stand-in where a subcommand cannot be imported.
    if subcommand is None or (subcommand.short_help or "").startswith("cannot be loaded"):
        raise BadCommand(f"{name}: no subcommand {rest[0]!r}, or it cannot be imported")
    parse_click(subcommand, f"{name} {rest[0]}", rest[1:])
