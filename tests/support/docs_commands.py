"""Checks a command of the documentation without running it: does it exist, with these options?"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import click
from celery.bin.celery import celery
from packaging.requirements import Requirement

from batchery.cli.main import main as batchery

ROOT = Path(__file__).resolve().parents[2]

#: Built into every shell.
SHELL_WORDS = {"cd", "echo", "exit", "export", "kill", "test", "wait"}

#: Commands that readers need and the tests do not: they may be missing here.
NOT_HERE = {"curl", "docker", "helm", "kubectl", "optimum-cli", "systemctl", "useradd"}


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
    """Checks one simple command, with the files of the current folder.

    Args:
        command: Its words.

    Raises:
        BadCommand: Something in it does not exist.
    """
    name, *arguments = command
    if name in ("batchery", "celery"):
        parse_click(batchery if name == "batchery" else celery, name, arguments)
        if name == "celery":
            check_app(arguments)
    elif name == "make":
        check_make(arguments)
    elif name in ("pip", "uv"):
        check_install(arguments)
    elif re.fullmatch(r"python3?(\.\d+)?", name):
        check_python(arguments)
    elif name not in SHELL_WORDS | NOT_HERE and not executable(name):
        raise BadCommand(f"{name}: no such command; add it to NOT_HERE if it is meant")


def executable(name: str) -> str | None:
    """Path of a command, looked for beside this Python first."""
    return shutil.which(name, path=search_path())


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


def check_app(arguments: list[str]) -> None:
    """Raises `BadCommand` where `-A name` names no module."""
    for option, value in pairwise(arguments):
        if option in ("-A", "--app") and not is_module(re.split(r"[.:]", value)[0]):
            raise BadCommand(f"celery -A {value}: no such module, here or in a block above")


def is_module(name: str) -> bool:
    """Whether a module could be imported."""
    return bool(name) and importlib.util.find_spec(name) is not None


def check_make(arguments: list[str]) -> None:
    """Raises `BadCommand` where a target or a variable is not in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if is_variable and not re.search(rf"^{re.escape(name)} \?=", makefile, re.MULTILINE):
            raise BadCommand(f"make: the Makefile has no variable {name}")
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BadCommand(f"make {' '.join(arguments)}: {done.stderr.strip()}")


def check_install(arguments: list[str]) -> None:
    """Raises `BadCommand` where `pip install` asks for an extra that this project has not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in arguments:
        # `.[extra]` is this project, too.
        name = re.sub(r"^\.(?=\[)", "batchery", word)
        if re.match(r"batchery\b", name):
            unknown = Requirement(name).extras - set(project["optional-dependencies"])
            if unknown:
                raise BadCommand(f"pip: batchery has no extra {sorted(unknown)}")


def check_python(arguments: list[str]) -> None:
    """Raises `BadCommand` where `python -m module` or `python file.py` names nothing."""
    if not arguments or arguments[0] in ("-V", "--version", "-c"):
        return
    if arguments[0] == "-m":
        name = "".join(arguments[1:2])
        if not is_module(name):
            raise BadCommand(f"python -m {name}: no such module")
    elif not (Path(arguments[0]).is_file() or (ROOT / arguments[0]).is_file()):
        raise BadCommand(f"python {arguments[0]}: no such file in the page or the repository")
