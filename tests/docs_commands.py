"""Checks a command of the documentation without running it: does it exist, with these options?"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import click
from celery.bin.celery import celery
from packaging.requirements import Requirement

from batchery.cli import main as batchery

ROOT = Path(__file__).resolve().parents[1]

#: Built into every shell.
SHELL_WORDS = {"cd", "echo", "exit", "export", "kill", "test", "wait"}


class BadCommand(Exception):
    """A command that the reader could not run as it stands; the text says why."""


def check(command: list[str], *, files: set[str], missing: set[str]) -> None:
    """Checks one simple command.

    Args:
        command: Its words.
        files: Names of the files that the page writes: scripts and app modules.
        missing: Executables that this machine need not have.

    Raises:
        BadCommand: Something in it does not exist.
    """
    name, *arguments = command
    if name in ("batchery", "celery"):
        parse_click(batchery if name == "batchery" else celery, name, arguments)
        if name == "celery":
            check_app(arguments, files)
    elif name == "make":
        check_make(arguments)
    elif name in ("pip", "uv"):
        check_install(arguments)
    elif re.fullmatch(r"python3?(\.\d+)?", name):
        check_python(arguments, files)
    elif name not in SHELL_WORDS | missing and not executable(name):
        raise BadCommand(f"{name}: no such command; say <!-- test: needs {name} --> if it is meant")


def executable(name: str) -> str | None:
    """Path of a command, looked for beside this Python first."""
    return shutil.which(name, path=search_path())


def search_path() -> str:
    """PATH with the folder of this Python in front, as in an activated environment."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def parse_click(command: click.Command, name: str, arguments: list[str]) -> None:
    """Follows a click command to its subcommand; every option and choice must be known.

    Raises:
        BadCommand: A subcommand or an option does not exist.
    """
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        options, rest, _ = command.make_parser(context).parse_args(list(arguments))
    except click.UsageError as error:
        raise BadCommand(f"{name}: {error.format_message()}") from None
    for parameter in command.params:
        value = options.get(parameter.name or "")
        if parameter.required and value is None and not options.get("help"):
            raise BadCommand(f"{name}: {_spelling(parameter)} is missing")
        if type(parameter.type) is click.Choice and isinstance(value, str):
            check_choice(name, parameter.type, value)
    if not isinstance(command, click.Group) or not rest:
        return
    subcommand = command.get_command(context, rest[0])
    if subcommand is None or is_stand_in(subcommand):
        raise BadCommand(f"{name}: no subcommand {rest[0]!r}, or it cannot be imported")
    parse_click(subcommand, f"{name} {rest[0]}", rest[1:])


def _spelling(parameter: click.Parameter) -> str:
    is_option = isinstance(parameter, click.Option)
    return parameter.opts[0] if is_option else parameter.human_readable_name


def check_choice(name: str, choices: click.Choice[str], value: str) -> None:
    """Raises `BadCommand` where an option's value is none of its choices."""
    if value not in choices.choices:
        raise BadCommand(f"{name}: {value!r} is none of {', '.join(choices.choices)}")


def is_stand_in(command: click.Command) -> bool:
    """Whether it only says that the real subcommand cannot be imported."""
    return (command.short_help or "").startswith("cannot be loaded")


def check_app(arguments: list[str], files: set[str]) -> None:
    """Raises `BadCommand` where `-A name` names no module that the page wrote or Python knows."""
    for option, value in pairwise(arguments):
        if option in ("-A", "--app"):
            module = re.split(r"[.:]", value)[0]
            if f"{module}.py" not in files and importlib.util.find_spec(module) is None:
                raise BadCommand(f"celery -A {value}: the page has no block '# {module}.py'")


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
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    for word in arguments:
        if re.match(r"batchery\b", word):
            unknown = Requirement(word).extras - set(extras)
        elif found := re.fullmatch(r"\.\[(.*)\]", word):
            unknown = set(found[1].split(",")) - set(extras)
        else:
            continue
        if unknown:
            raise BadCommand(f"pip: batchery has no extra {sorted(unknown)}")


def check_python(arguments: list[str], files: set[str]) -> None:
    """Raises `BadCommand` where `python -m module` or `python file.py` names nothing."""
    if not arguments or arguments[0] in ("-V", "--version", "-c"):
        return
    if arguments[0] == "-m":
        name = arguments[1] if len(arguments) > 1 else ""
        if f"{name}.py" not in files and (not name or importlib.util.find_spec(name) is None):
            raise BadCommand(f"python -m {name}: no such module")
    elif arguments[0] not in files and not (ROOT / arguments[0]).is_file():
        raise BadCommand(f"python {arguments[0]}: no such file in the page or the repository")
