"""The engine `vllm`: `vllm serve` as a child, asked on a private socket as any server is."""

import json
import logging
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from batchery.errors import BatcheryError, ModelLoadError
from batchery.model import Advance
from batchery.settings import ModelSettings
from batchery_worker.devstack.guarded_process import GuardedProcess
from batchery_worker.models.openai_server.model import OpenAIServerModel, ServerKeywords
from batchery_worker.models.source import ModelSource, loading

logger = logging.getLogger("batchery.vllm")

#: How long the server may take to end, in seconds; then it is killed.
END_TIMEOUT_S = 5.0

#: How often it is looked whether a server that starts is ready, in seconds.
LOOK_S = 0.2

#: Its address; the socket is where it listens.
ADDRESS = "http://vllm/v1"

#: vLLM's names of number formats.
DTYPES = {"auto": "auto", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

#: What requests ask for unless jobs say something else; vLLM would take the model's own.
DEFAULTS = {"top_p": 1.0, "top_k": 0}

#: Variables that would lead another environment's Python to packages of this one.
FOREIGN = ("PYTHONPATH", "PYTHONHOME")

#: vLLM must send nothing home unasked.
VARIABLES = {"VLLM_NO_USAGE_STATS": "1"}

#: Options by which vLLM spreads over several GPUs.
SPREAD = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")

#: A line that says what went wrong, and those that only point to it.
CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|error): .+)")
POINTERS = ("See root cause", "See stack trace")


class VllmKeywords(ServerKeywords):
    """Keywords of a job with vLLM.

    Attributes:
        structured_outputs: What the text must be: `json`, `regex`, `choice` or `grammar`.
    """

    structured_outputs: dict[str, Any] | None = None


class VllmModel(OpenAIServerModel):
    """Writes texts with vLLM, which runs in an environment of its own."""

    keywords = VllmKeywords
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    slots = 64

    def load(self, device: str) -> None:
        """Starts the server, and waits until it is ready.

        Raises:
            ModelLoadError: It does not start; one line says why.
        """
        with loading(self.settings.model):
            self._start(device)

    def _start(self, device: str) -> None:
        settings = self.settings
        if settings.cache_tokens is not None:
            instead = "engine_options.kv_cache_memory_bytes"
            raise ValueError(f"cache_tokens is not for the engine vllm; set {instead}")
        python = Path(settings.engine_python or "").expanduser()
        if not os.access(python, os.X_OK) or python.is_dir():
            raise ValueError(
                f"engine_python = {settings.engine_python!r}: there is no such program; name the"
                " Python of an environment that has vllm, such as /opt/vllm/bin/python"
            )
        self._source = ModelSource(settings)
        folder = Path(tempfile.mkdtemp(prefix="batchery-vllm-"))
        path = str(folder / "socket")
        options = {**choose_options(settings, self._source, self.slots), "uds": path}
        self._process = GuardedProcess(
            [
                *(str(python), "-m", "vllm.entrypoints.cli.main", "serve", self._source.name),
                *spell_options(options),
            ],
            env=make_environment(device, settings.engine_options),
            remove=folder,
            on_line=partial(logger.info, "%s"),
        )
        # It listens when its engine is ready. The parent ends this wait if it takes too long.
        while not listens(path):
            if self._process.poll() is not None:
                self._process.wait()
                raise ModelLoadError(f"engine vllm ({python}) does not start: {self._find_cause()}")
            time.sleep(LOOK_S)
        self._open(ADDRESS, {}, path)

    def version(self) -> str:
        """Changes with the model's files and options."""
        return self._source.version()

    def step(self) -> Sequence[Advance]:
        """Collects what the server has written.

        Raises:
            BatcheryError: It has died.
        """
        code = self._process.poll()
        if code is not None:
            raise BatcheryError(
                f"engine vllm: its process has ended with exit code {code}: {self._find_cause()}"
            )
        return super().step()

    def unload(self) -> None:
        """Ends the server."""
        super().unload()
        self._process.stop(END_TIMEOUT_S)

    def _find_cause(self) -> str:
        """Why the server ended, in one line of its log; its last ones only point to the reason."""
        for line in reversed(self._process.tail().splitlines()):
            found = CAUSE.search(line)
            if found and not any(each in line for each in POINTERS):
                return found[1]
        return self._process.tail(1) or "it said nothing"


def choose_options(settings: ModelSettings, source: ModelSource, slots: int) -> dict[str, Any]:
    """Options of `vllm serve`, by name."""
    chosen = {
        "served_model_name": settings.model,
        "revision": settings.revision if source.folder is None else None,
        "trust_remote_code": settings.trust_remote_code or None,
        # By itself vLLM would also load weights that are pickles.
        "load_format": "safetensors",
        "uvicorn_log_level": "warning",
        "dtype": DTYPES[settings.dtype],
        "max_num_seqs": slots,
        "max_model_len": settings.max_length,
        "max_num_batched_tokens": settings.max_batch_tokens,
    }
    known = {name: value for name, value in chosen.items() if value is not None}
    return {**known, **settings.engine_options}


def listens(path: str) -> bool:
    """Whether somebody listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as tried:
        return tried.connect_ex(path) == 0


def spell_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as a command line has them."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={value if isinstance(value, str) else json.dumps(value)}"


def make_environment(device: str, options: Mapping[str, Any]) -> dict[str, str]:
    """The variables of the server of a device."""
    ours = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    fixed = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    kind, _, index = device.partition(":")
    if kind == "cuda" and all(options.get(name, 1) == 1 for name in SPREAD):
        there = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        number = int(index or 0)
        has_name = number < len(there) and there[number]
        fixed["CUDA_VISIBLE_DEVICES"] = there[number] if has_name else str(number)
    return {**VARIABLES, **ours, **fixed}
