"""ONNX Runtime in the place of torch, on CPUs: it computes what a model of transformers would.

Everything around the pass is shared: padding, pooling, scores, the copy to the host.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from batchery_worker.device_pool.weights import ONNX_FILES, find_onnx_files, sum_file_bytes
from batchery_worker.models.forward import RandomTexts
from batchery_worker.models.source import ModelSource, reason
from batchery_worker.models.tokenizer import Prepared

#: Number formats that a session takes and gives.
INPUTS = {"tensor(int64)": torch.int64, "tensor(int32)": torch.int32}
OUTPUTS = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16}

#: What to read of a pass, by transformers' name, and sentence-transformers' name of the same.
SYNONYMS = {"last_hidden_state": ("last_hidden_state", "token_embeddings"), "logits": ("logits",)}

#: Longest text that is tried before a file is taken. A table of positions has 512 or a few more,
#: and longer passes would delay each load.
LONGEST_TRIAL_TOKENS = 1024

#: Level of ONNX Runtime's log that writes nothing: errors are raised as well.
SILENT = 4


class OnnxSession:
    """A model's file, ready to compute; it is called as a model of transformers is.

    Attributes:
        inputs: Names of what it takes.
        dtype: Number format of what it gives.
        paths: Its file, and those of its weights.
        held_bytes: Their size, which is the memory of the weights. The process's growth would be
            no better: it has what other threads do, and what a library keeps for its next passes.
    """

    def __init__(
        self, source: ModelSource, file: str | None, field: str, device: torch.device, threads: int
    ) -> None:
        """Reads the file and optimizes it for the device.

        Args:
            source: The model.
            file: The setting `onnx_file`.
            field: What to read of a pass, a key of `SYNONYMS`.
            device: Of torch; a CPU.
            threads: Threads of one pass, at least 1.

        Raises:
            ValueError: ONNX Runtime or the file is missing, or the file cannot be read or does not
                suit. Whoever loads the model says which one it is.
        """
        self._field = field
        self.paths = _find_files(source, file)
        self.held_bytes = sum_file_bytes(self.paths)
        self._session = _open(self.paths[0], device, threads)
        taken = {each.name: each for each in self._session.get_inputs()}
        given = {each.name: each for each in self._session.get_outputs()}
        self._output = next((name for name in SYNONYMS[field] if name in given), "")
        if problem := _find_problem(taken, given.get(self._output)):
            names = {"taken": ", ".join(taken), "given": ", ".join(given), "field": field}
            raise ValueError(f"{self.paths[0].name} {problem.format(**names)}")
        self._types = {name: INPUTS[each.type] for name, each in taken.items()}
        self.inputs: Collection[str] = self._types.keys()
        self.dtype = OUTPUTS[given[self._output].type]

    def __call__(self, **inputs: Tensor) -> SimpleNamespace:
        """Computes a padded batch; the inputs are (B, L)."""
        binding = self._session.io_binding()
        # It reads and writes the memory of these tensors, so they must live as long as the pass.
        kept = {name: inputs[name].to(dtype).contiguous() for name, dtype in self._types.items()}
        for name, tensor in kept.items():
            number = str(tensor.dtype).removeprefix("torch.")
            binding.bind_input(name, "cpu", 0, number, tuple(tensor.shape), tensor.data_ptr())
        binding.bind_output(self._output, "cpu", 0)
        self._session.run_with_iobinding(binding)
        return SimpleNamespace(**{self._field: from_dlpack(binding.get_outputs()[0])})

    def check_longest(
        self,
        compute: Callable[[Sequence[Prepared]], Tensor],
        texts: RandomTexts,
        max_length: int | None,
    ) -> None:
        """Makes sure that the file is for texts as long as the model's config says.

        Args:
            compute: A padded pass.
            texts: Makes the text.
            max_length: Of a text, in tokens; None if unlimited.

        Raises:
            ValueError: It is not; says what to do.
        """
        length = min(max_length or LONGEST_TRIAL_TOKENS, LONGEST_TRIAL_TOKENS)
        try:
            compute(texts([length]))
        except Exception as error:
            raise ValueError(
                f"{self.paths[0].name} cannot compute a text of {length} tokens; set max_length to"
                f" what it was exported for, or export it anew: {reason(error)}"
            ) from error


def _find_files(source: ModelSource, file: str | None) -> Sequence[Path]:
    if paths := find_onnx_files(file, source.path):
        return paths
    names = ONNX_FILES if file is None else (file,)
    raise ValueError(
        f"engine = 'onnx', but there is no {' and no '.join(names)}; set onnx_file to the one to"
        " take, or make one in a local folder: optimum-cli export onnx"
    )


def _open(path: Path, device: torch.device, threads: int) -> Any:
    if device.type != "cpu":
        raise ValueError(f"engine = 'onnx' runs on cpu, not on {device}")
    # It is an extra.
    if find_spec("onnxruntime") is None:
        raise ValueError("engine = 'onnx' needs: pip install 'batchery[onnx]'")
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = SILENT
    # It would keep a plan of memory for each shape, and texts make new shapes all the time.
    options.enable_mem_pattern = False
    # Threads that spin between passes take time from those that tokenize and store results.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return runtime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # It seldom names the file of the weights, if that is at fault.
        raise ValueError(
            f"{path.name} cannot be loaded; copy it again with its weights, or export it anew:"
            f" {reason(error)}"
        ) from error


def _find_problem(taken: Mapping[str, Any], output: Any) -> str:
    """Why inputs and output of a file do not suit; empty if they do."""
    if output is None:
        return "gives {given}, not {field}; export it for this kind of model"
    for name in ("input_ids", "attention_mask"):
        if name not in taken:
            return f"takes {{taken}}, and no {name}; export it with inputs of these names"
    if output.type not in OUTPUTS:
        return f"gives {output.type}, not float or float16; export it anew"
    return ""
