"""Runs a page of documentation as its reader would, from top to bottom, in an empty folder."""

import ast
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Self

import yaml
from celery import Celery

from batchery import Settings
from docs_blocks import BadPage, Block, Command, read_blocks, read_commands, simple_commands
from docs_commands import check, search_path
from harness import wait_for

#: How long one block or command may take, in seconds.
BLOCK_S = 60.0

#: How long a worker may take to start, in seconds.
START_S = 90.0


class Page:
    """One page on its way through its blocks; a context manager, which ends what the page started.

    Args of the constructor:
        path: The page.
        directory: Where its commands and Python run and its files are written; empty.
        redis_url: Takes the place of the Redis that the page's code names.
        local_models: Model id of the hub -> folder that stands for it, as there is no network.
    """

    def __init__(
        self, path: Path, directory: Path, redis_url: str, local_models: Mapping[str, Path]
    ) -> None:
        self._path = path
        self._directory = directory
        self._redis_url = redis_url
        self._local_models = local_models
        self._blocks = read_blocks(path)
        self._files = {block.file for block in self._blocks if block.file}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._python: subprocess.Popen[str] | None = None
        self._log = (directory / ".log").open("ab")
        self._environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("BATCHERY_")
            },
            "PATH": search_path(),
            # Celery warns of being root, as tests in containers are.
            "PYTHONWARNINGS": "ignore",
            "HF_HUB_OFFLINE": "1",
            "CELERY_BROKER_URL": redis_url,
            "CELERY_RESULT_BACKEND": redis_url,
            "BATCHERY_REDIS_URL": redis_url,
        }
        self._kinds: dict[str, Callable[[Block], object]] = {
            "bash": self._shell,
            "console": self._shell,
            "json": lambda block: json.loads(block.code),
            "jsonl": lambda block: [json.loads(line) for line in block.code.splitlines()],
            "mermaid": lambda _: None,
            "python": self._run_python,
            "text": lambda _: None,
            "toml": self._toml,
            "yaml": lambda block: list(yaml.safe_load_all(block.code)),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_python()
        for command in list(self._started):
            self._stop(command)
        self._log.close()

    def run(self) -> None:
        """Tests every block, in order.

        Raises:
            AssertionError: A block does not do what the page says; names page and line.
        """
        for block in self._blocks:
            try:
                kind = self._kinds.get(block.language)
                if kind is None:
                    raise BadPage(f"unknown language {block.language!r}; known: {[*self._kinds]}")
                kind(block)
                if block.file:
                    self._write(block)
            except Exception as error:
                log = (self._directory / ".log").read_text(errors="replace")[-5000:]
                raise AssertionError(f"{block.place}: {error}\n{log}".rstrip()) from error

    def _write(self, block: Block) -> None:
        path = self._directory / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.code, encoding="utf-8")
        # A reader who changes a module starts Python anew.
        self._stop_python()

    # --- Python ---

    def _run_python(self, block: Block) -> None:
        if block.file or block.directive == "needs":
            check_python(block, self._files)
            return
        self._python = self._python or subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("docs_session.py"))],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        asked = {"page": str(self._path), "line": block.line, "code": block.code}
        with _deadline(self._python):
            _pipe(self._python.stdin).write(f"{json.dumps(asked)}\n")
            _pipe(self._python.stdin).flush()
            answer = _pipe(self._python.stdout).readline()
        problem = json.loads(answer) if answer else f"Python ended, or took over {BLOCK_S:g} s"
        assert problem is None, problem

    def _stop_python(self) -> None:
        if self._python is not None:
            self._python.communicate(timeout=BLOCK_S)
            self._python = None

    # --- shell ---

    def _shell(self, block: Block) -> None:
        missing = {block.argument} if block.directive == "needs" else set[str]()
        for command in read_commands(block):
            for words in simple_commands(command.text):
                check(words, files=self._files, missing=missing)
            if block.directive == "run":
                self._run(command)
            elif block.directive == "start":
                self._start(command)

    def _run(self, command: Command) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.text],
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"{command.text}: exit code {done.returncode}\n{done.stdout}"
        pattern = ".*".join(re.escape(part.strip()) for part in command.output.split("..."))
        if command.output and not re.fullmatch(pattern, done.stdout.strip(), re.DOTALL):
            raise AssertionError(f"{command.text}: prints\n{done.stdout}not\n{command.output}")

    def _start(self, command: Command) -> None:
        """Starts a worker, which then serves the rest of the page; the same command restarts it."""
        words = shlex.split(command.text)
        if words[0] != "celery" or "worker" not in words:
            raise BadPage("'test: start' is for `celery ... worker`, whose start can be awaited")
        self._stop(command.text)
        process = subprocess.Popen(
            words,
            cwd=self._directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._started[command.text] = process
        with Celery(broker=self._redis_url, set_as_current=False) as client:

            def ready() -> bool:
                assert process.poll() is None, f"{command.text}: ended with {process.poll()}"
                answers = client.control.ping(timeout=0.3) or []
                return len(answers) >= len(self._started)

            wait_for(ready, f"{command.text}: ready", START_S)

    def _stop(self, command: str) -> None:
        process = self._started.pop(command, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(BLOCK_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    # --- TOML ---

    def _toml(self, block: Block) -> None:
        content = tomllib.loads(block.code)
        if not block.file:
            raise BadPage("which file is it? say so in its first line: # batchery.toml")
        if Path(block.file).name != "batchery.toml":
            return
        check_settings(content, self._directory)
        for name, model in content.get("models", {}).items():
            if model["model"] in self._local_models:
                variable = f"BATCHERY_MODELS__{name.upper()}__MODEL"
                self._environment[variable] = str(self._local_models[model["model"]])


def check_python(block: Block, files: set[str]) -> None:
    """Checks a block that is not run here: its syntax, and that what it imports exists.

    Raises:
        AssertionError: Something does not exist.
    """
    own = {Path(name).stem for name in files}
    for node in ast.walk(ast.parse(block.code, str(block.page))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _import(alias.name, own)
        elif isinstance(node, ast.ImportFrom):
            module = _import(node.module or "", own)
            for alias in node.names:
                assert module is None or hasattr(module, alias.name), (
                    f"{node.module} has no {alias.name}"
                )


def _import(name: str, own: set[str]) -> ModuleType | None:
    """Imports a module, except one that the page itself wrote."""
    return None if name.partition(".")[0] in own else importlib.import_module(name)


def check_settings(content: Mapping[str, Any], directory: Path) -> None:
    """Raises a `SettingsError` where the content of a batchery.toml is not valid."""
    with contextlib.chdir(directory):
        Settings.load(None, **content)


@contextlib.contextmanager
def _deadline(process: subprocess.Popen[str]) -> Iterator[None]:
    """Kills a process that is still at it after `BLOCK_S`, so that reading from it ends."""
    timer = threading.Timer(BLOCK_S, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
