"""Systems that compute in a process of their own, with no queue: loops, and other projects."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine.sample import Sample
from benchmarks.engine.target import Target
from benchmarks.venvs import child_environment


def options_of(target: Target) -> dict[str, Any]:
    """What a script that embeds texts is told of its model."""
    return {
        "--model": target.folder,
        "--device": target.device,
        "--dtype": target.dtype,
        "--batch-size": target.peer_batch_size,
        "--padded-tokens": target.loop_tokens[0],
        "--packed-tokens": target.loop_tokens[1],
    }


class Child:
    """A script that answers line by line; it loads its model once."""

    def __init__(self, python: Path, module: str, options: Mapping[str, Any]) -> None:
        """Starts it, without waiting for its model.

        Args:
            python: Of its environment.
            module: The script, from `benchmarks` on.
            options: Of its command line.
        """
        self._module = module
        given = [str(part) for option in options.items() for part in option]
        self._process = subprocess.Popen(
            [python, "-W", "ignore", "-m", f"benchmarks.{module}", *given],
            env=child_environment(HF_HUB_OFFLINE="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        """Waits until the model is loaded.

        Raises:
            SystemExit: The process has ended.
        """
        self._receive()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Sends one request and returns the answer; raises as `wait_ready`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._module}: ended with {self._process.wait()}; see above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


class ChildSystem:
    """One row: a child, and what it is asked for."""

    def __init__(self, name: str, child: Child, request: Mapping[str, Any]) -> None:
        self.name = name
        self._child = child
        self._request = request

    def wait_ready(self) -> None:
        """Nothing: the child may serve several rows."""

    def run(self, texts: Sequence[str], *, keep: bool = False) -> Sample:
        """Embeds all texts once."""
        answer = self._child.ask({**self._request, "texts": texts, "keep": keep})
        return Sample(
            seconds=answer["seconds"],
            cpu_s={"process": answer["cpu_s"]},
            tokens=answer.get("tokens", 0),
            computed_tokens=answer.get("computed_tokens", 0),
            stages_s=answer.get("stages_s", {}),
            results=[json.loads(each) for each in answer["results"]],
        )

    def stop(self) -> None:
        """Nothing: the child may serve several rows."""
