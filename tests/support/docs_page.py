"""Follows a page of documentation as its reader would; CONTRIBUTING.md has the rules.

A page has a process of its own, because its modules, Celery apps and settings must not reach other
tests: `python -m support.docs_page PAGE`.
"""

import doctest
import faulthandler
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import yaml
from celery import Celery
from celery.contrib.testing.app import setup_default_app
from sybil import Document, Example, Region
from sybil.evaluators.doctest import DocTestEvaluator
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract.doctest import DocTestStringParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from batchery import Settings
from support.docs_commands import check_commands, read_commands, search_path
from support.harness import PYTHONPATH, START_S, STARTUP, TESTS, wait_for
from support.patience import patient

#: What stands behind the opening fence: the language, and how the block is tested.
BLOCKS = RawFencedCodeBlockLexer(re.compile(r"(?P<info>.*)\n"))

#: A block whose first line is such a comment is a file of that name.
FILE_LINE = re.compile(r"# *(?P<name>[\w./-]+\.\w+)\n")

#: Maximum time of one command, in seconds.
COMMAND_S = patient(60.0)

#: Commands that may be too early: a caller may have a result before the worker's line about it is
#: in the log, or it is counted, and a worker may be too busy to answer in time.
LATER = ("grep ", "curl ", "batchery stats ", "celery -A tasks inspect ")

#: How long they may take to print what they should, in seconds.
LATER_S = patient(30.0)

#: Maximum time of one page, in seconds; then the process says where it hangs, and ends.
PAGE_S = patient(150.0)

#: Where a page finds the gateway that it starts; no other test has this port.
GATEWAY = "http://localhost:8000"

#: What pages call their Redis and their cluster -> the variable that says which one it is.
REDIS = {
    "redis://localhost:6379/0": "CELERY_BROKER_URL",
    "redis+cluster://localhost:7000,localhost:7001,localhost:7002": "BATCHERY_REDIS_URL",
}

#: Maximum length of what a failure shows of the log, in characters.
MAX_LOG_CHARS = 10_000

#: Exit code of a page that was followed to its end. A block that ends Python must not look like it.
FOLLOWED = 42

#: Kinds of blocks that nothing of is run: a page with no others needs no process of its own.
LOOKED_AT = {"bash", "console", "json", "jsonl", "mermaid", "text", "toml", "yaml"}

PYTHON = PythonEvaluator()
DOCTESTS = DocTestStringParser(DocTestEvaluator(doctest.ELLIPSIS))
OUTPUT = doctest.OutputChecker()
OUTPUT_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Reader:
    """Who follows a page: a parser of Sybil's, with the workers that the page has started."""

    def __init__(self) -> None:
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._gateways: list[subprocess.Popen[bytes]] = []
        self._shell = ExitStack()
        self._kinds: dict[str, Callable[[str], object]] = {
            "bash": lambda code: check_commands("bash", code),
            "console": lambda code: check_commands("console", code),
            "console run": run,
            "console start": self._start,
            "json": json.loads,
            "jsonl": lambda code: [json.loads(line) for line in code.splitlines()],
            "mermaid": str,
            "text": str,
            "toml": lambda code: Settings.load(None, **tomllib.loads(code)),
            "yaml": lambda code: list(yaml.safe_load_all(code)),
        }

    def __call__(self, document: Document) -> Iterator[Region]:
        """Finds the blocks of a page, each with what is to be done with it."""
        for region in BLOCKS(document):
            code = region.lexemes["source"]
            if region.lexemes["info"] == "pycon" and code.startswith(">>> "):
                for statement in DOCTESTS(code, document.path):
                    statement.adjust(region, code)
                    yield statement
            else:
                region.parsed, region.evaluator = code, self._evaluate
                yield region

    def _evaluate(self, example: Example) -> None:
        kind, _, name = example.region.lexemes["info"].partition(" file=")
        code = str(example.parsed)
        if not name and (first := FILE_LINE.match(code)):
            name = first["name"]
        if name:
            self._write(name, code, example)
        elif kind == "python":
            PYTHON(example)
        if kind != "python":
            if kind not in self._kinds:
                raise ValueError(f"no such kind of block: {kind!r}; see CONTRIBUTING.md")
            self._kinds[kind](code)

    def _write(self, name: str, code: str, example: Example) -> None:
        """Writes a block to its file; a module is imported."""
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
        # A reader who changes a file starts Python anew.
        self._new_shell(example.namespace)
        if path.suffix == ".py":
            importlib.import_module(".".join(path.with_suffix("").parts))

    def _new_shell(self, namespace: dict[str, Any]) -> None:
        """Forgets the names of earlier blocks, the modules of the page, and their Celery apps."""
        namespace.clear()
        namespace["__name__"] = "__main__"
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{Path.cwd()}{os.sep}"):
                del sys.modules[name]
        importlib.invalidate_caches()
        self._shell.close()
        self._shell.enter_context(setup_default_app(Celery(set_as_current=False)))

    def _start(self, code: str) -> None:
        """Starts a gateway, or a worker; the worker of an equal command is stopped first."""
        [(command, _)] = read_commands("console", code)
        if command in self._workers:
            stop(self._workers.pop(command))
        process = subprocess.Popen(shlex.split(command), stdin=subprocess.DEVNULL)
        if command.startswith("batchery serve"):
            self._gateways.append(process)
            wait_for(lambda: answers(GATEWAY), f"{command}: ready", START_S)
            return
        self._workers[command] = process
        with Celery(set_as_current=False) as client:

            def ready() -> bool:
                assert process.poll() is None, f"{command}: ended with {process.poll()}"
                answers = client.control.ping(timeout=0.3) or []
                return len(answers) >= len(self._workers)

            wait_for(ready, f"{command}: ready", START_S)

    def follow(self, page: Path) -> None:
        """Tests the blocks of a page, from its top to its end, in the current folder.

        Raises:
            Exception: A block does not do what the page says; its notes name page and line.
        """
        with tempfile.TemporaryDirectory() as folder:
            # What a page calls its Redis is that of the test: a client takes what it is given.
            text = page.read_text(encoding="utf-8")
            copy = Path(folder, page.name)
            for url, variable in REDIS.items():
                text = text.replace(url, os.environ.get(variable, url))
            copy.write_text(text, "utf-8")
            document = Document.parse(str(copy), self)
        with self._shell:
            self._new_shell(document.namespace)
            try:
                for example in document:
                    with place(example):
                        example.evaluate()
            finally:
                for process in [*self._gateways, *self._workers.values()]:
                    stop(process)


def is_only_looked_at(page: Path) -> bool:
    """Whether nothing of a page is run."""
    blocks = BLOCKS(Document(page.read_text(encoding="utf-8"), str(page)))
    return all(each.lexemes["info"] in LOOKED_AT for each in blocks)


def follow(page: Path, folder: Path, environment: Mapping[str, str]) -> None:
    """Tests the blocks of a page, in a process of its own where any of it is run.

    Args:
        page: The page.
        folder: Where its commands and its Python run, and its files are written.
        environment: Additional variables: they say which Redis and which models there are.

    Raises:
        Exception: A block does not do what the page says; has all that was printed.
    """
    if is_only_looked_at(page):
        with chdir(folder):
            Reader().follow(page)
        return
    # Celery warns of being root, as tests in containers are. The page's own Python is strict.
    own = {"PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1", "PATH": search_path()}
    own["PYTHONPATH"] = f"{PYTHONPATH}{os.pathsep}{TESTS.parent}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "support.docs_page", str(page)],
            cwd=folder,
            env={**os.environ, **own, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            # Whatever the page has started and left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read().decode(errors="replace")
    assert code == FOLLOWED, f"exit code {code}\n{printed[-MAX_LOG_CHARS:]}"


def answers(url: str) -> bool:
    """Whether a gateway is there and well."""
    try:
        return httpx2.get(f"{url}/health").is_success
    except httpx2.TransportError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a worker, which must come to its end by itself."""
    process.terminate()
    process.wait(COMMAND_S)


def run(code: str) -> None:
    """Runs the commands of a block; each must succeed, and print what the page shows."""
    for command, output in read_commands("console", code):
        done = execute(command)
        deadline_s = time.monotonic() + LATER_S
        while command.startswith(LATER) and (done.returncode or not shows(output, done.stdout)):
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
            done = execute(command)
        assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
        if not shows(output, done.stdout):
            example = doctest.Example(command, output)
            difference = OUTPUT.output_difference(example, done.stdout, OUTPUT_FLAGS)
            raise AssertionError(f"{command}:\n{difference}")


def execute(command: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command of a page."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def shows(output: str, printed: str) -> bool:
    """Whether a command has printed what its page shows, which may be nothing."""
    return not output or OUTPUT.check_output(output, printed, OUTPUT_FLAGS)


@contextmanager
def place(example: Example) -> Iterator[None]:
    """Notes in an error where in the page it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"{example.path}:{example.line}")
        raise


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PAGE_S, exit=True)
    # The rest of it was for this process alone.
    os.environ["PYTHONPATH"] = STARTUP
    Reader().follow(Path(sys.argv[1]))
    sys.exit(FOLLOWED)
