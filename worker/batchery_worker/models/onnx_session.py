"""ONNX Runtime in the place of torch: a session computes what a model of transformers would.

Everything around the pass is shared: padding, pooling, scores, the copy to the host.
"""

import hashlib
from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from batchery_worker.models.source import ModelSource

#: Where the file of a model is, if no setting says so: as sentence-transformers and as optimum
#: write it.
FILES = ("onnx/model.onnx", "model.onnx")

#: Ends of the names of files beside it, which have its weights where they are large.
WEIGHTS = ("_data", ".data")

#: ONNX Runtime's part for a kind of device, and the package that has it.
PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "'batchery[onnx]'"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime-gpu"),
}

#: Number formats that a session takes and gives.
INPUTS = {"tensor(int64)": torch.int64, "tensor(int32)": torch.int32}
OUTPUTS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}

#: What to read of a pass, by transformers' name, and sentence-transformers' name of the same.
SYNONYMS = {"last_hidden_state": ("last_hidden_state", "token_embeddings"), "logits": ("logits",)}

#: Level of ONNX Runtime's log that writes nothing: errors are raised as well.
SILENT = 4


class OnnxSession:
    """A model's file, ready to compute; it is called as a model of transformers is.

    Attributes:
        inputs: Names of what it takes.
        dtype: Number format of what it gives.
    """

    def __init__(
        self, source: ModelSource, file: str | None, field: str, device: torch.device, threads: int
    ) -> None:
        """Reads the file and optimizes it for the device.

        Args:
            source: The model.
            file: The setting `onnx_file`.
            field: What to read of a pass, a key of `SYNONYMS`.
            device: Of torch, CPU or CUDA.
            threads: Threads of one pass on a CPU, at least 1.

        Raises:
            ValueError: ONNX Runtime or the file is missing, or the file does not suit. Whoever
                loads the model says which one it is.
            Exception: ONNX Runtime cannot read the file, which its text names.
        """
        self._device = device
        self._field = field
        self._paths = _find_files(source, file)
        self._session = _open(self._paths[0], device, threads)
        taken = {each.name: each for each in self._session.get_inputs()}
        given = {each.name: each for each in self._session.get_outputs()}
        self._output = next((name for name in SYNONYMS[field] if name in given), "")
        if problem := _find_problem(taken, given.get(self._output)):
            name, outputs = self._paths[0].name, ", ".join(given)
            raise ValueError(f"{name} {problem.format(given=outputs, field=field)}")
        self._types = {name: INPUTS[each.type] for name, each in taken.items()}
        self.inputs: Collection[str] = self._types.keys()
        self.dtype = OUTPUTS[given[self._output].type]

    def __call__(self, **inputs: Tensor) -> SimpleNamespace:
        """Computes a padded batch; the inputs are (B, L), on the device."""
        binding = self._session.io_binding()
        kind, index = self._device.type, self._device.index or 0
        # It reads and writes the memory of these tensors, so they must live as long as the pass.
        kept = {name: inputs[name].to(dtype).contiguous() for name, dtype in self._types.items()}
        for name, tensor in kept.items():
            number = str(tensor.dtype).removeprefix("torch.")
            binding.bind_input(name, kind, index, number, tuple(tensor.shape), tensor.data_ptr())
        binding.bind_output(self._output, kind, index)
        if kind == "cuda":
            # The session has a stream of its own, which knows nothing of copies on torch's.
            torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return SimpleNamespace(**{self._field: from_dlpack(binding.get_outputs()[0])})

    def check_inputs(self, made: Collection[str]) -> None:
        """Makes sure that all inputs are made. Raises ValueError: names those that are not."""
        if others := [*({*self.inputs} - {*made, "attention_mask"})]:
            name = self._paths[0].name
            raise ValueError(f"{name} takes {others}, which its tokenizer does not make")

    def identity(self) -> str:
        """The content of its files, and the version of ONNX Runtime."""
        whole = hashlib.blake2b(digest_size=16)
        for path in self._paths:
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "blake2b").digest())
        return f"{whole.hexdigest()} by {import_module('onnxruntime').__version__}"


def _find_files(source: ModelSource, file: str | None) -> list[Path]:
    """The file, and those of its weights, if there are any."""
    names = FILES if file is None else (file,)
    for name in names:
        if (path := source.path(name)) is not None:
            others = (source.path(f"{name}{end}") for end in WEIGHTS)
            return [path, *(each for each in others if each is not None)]
    raise ValueError(
        f"engine = 'onnx', but there is no {' and no '.join(names)}; set onnx_file to the one to"
        " take, or make one in a local folder: batchery export KIND FOLDER"
    )


def _open(path: Path, device: torch.device, threads: int) -> Any:
    if device.type not in PROVIDERS:
        raise ValueError(f"engine = 'onnx' runs on cpu and cuda, not on {device}")
    provider, package = PROVIDERS[device.type]
    # It is an extra.
    runtime = import_module("onnxruntime") if find_spec("onnxruntime") else None
    if runtime is None or provider not in runtime.get_available_providers():
        raise ValueError(f"engine = 'onnx' on {device} needs: pip install {package}")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = SILENT
    # It would keep a plan of memory for each shape, and texts make new shapes all the time.
    options.enable_mem_pattern = False
    # Threads that spin between passes take time from those that tokenize and store results.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    limits = _limit_memory(device) if device.type == "cuda" else {}
    session = runtime.InferenceSession(path, options, providers=[(provider, limits)])
    if session.get_providers()[0] != provider:
        # It goes on with a CPU, and says so in its log alone.
        raise ValueError(f"{package} cannot use {device}: its version of CUDA or cuDNN is not here")
    return session


def _limit_memory(device: torch.device) -> dict[str, Any]:
    """Options of the CUDA provider: the setting `memory_fraction` is for its memory as well."""
    share = torch.cuda.get_per_process_memory_fraction(device)
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return {
        "device_id": device.index,
        "gpu_mem_limit": int(share * total_bytes),
        # Otherwise it doubles what it holds each time, also for a single large pass.
        "arena_extend_strategy": "kSameAsRequested",
    }


def _find_problem(taken: Mapping[str, Any], output: Any) -> str:
    """Why inputs and output of a file do not suit; empty if they do."""
    if output is None:
        return "gives {given}, not {field}; export it for this kind of model"
    for name in ("input_ids", "attention_mask"):
        if name not in taken:
            return f"takes no {name}, so it is not for texts of many lengths; export it with one"
    for name, each in taken.items():
        if each.type not in INPUTS:
            return f"takes {name} as {each.type}, not as integers; export it anew"
        if any(isinstance(size, int) for size in each.shape):
            return f"takes {name} of the fixed shape {each.shape}; export it with dynamic axes"
    if output.type not in OUTPUTS:
        return f"gives {output.type}, not float or float16; export it anew"
    return ""
