"""Writes the ONNX file of a model in a folder, by torch's exporter, and checks it."""

import inspect
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from kombu.utils.imports import symbol_by_name

from batchery.errors import ModelLoadError
from batchery.installer import KINDS
from batchery.settings import ModelSettings
from batchery_worker.device_pool.weights import ONNX_FILES
from batchery_worker.models.source import reason
from batchery_worker.models.text_model import TextModel
from batchery_worker.models.verification import verify


def export(kind: str, folder: Path) -> Path:
    """Loads a model on the CPU, in fp32, and writes its file beside it.

    Returns:
        The file, `onnx/model.onnx` in the folder.

    Raises:
        ModelLoadError: The model cannot be loaded or exported, its file is wrong, or a package is
            missing. A file that was there stays.
    """
    settings = ModelSettings.model_validate(
        {"kind": kind, "model": str(folder), "dtype": "fp32", "forward": "padded"}
    )
    text_model: TextModel = symbol_by_name(KINDS[kind])(settings)
    text_model.load("cpu")
    path = folder / ONNX_FILES[0]
    try:
        with TemporaryDirectory(prefix=".onnx-", dir=folder) as made:
            new = Path(made, path.name)
            _write(text_model, new)
            # Some code has the lengths of these texts exported as constants, and nothing says so.
            ours = {"engine": "onnx", "dtype": "auto", "onnx_file": str(new.relative_to(folder))}
            report = verify(settings.model_copy(update=ours), "cpu")
            if not report.passed:
                raise ModelLoadError(f"the file's results differ: {report.comparisons[0]}")
            path.parent.mkdir(exist_ok=True)
            # A worker may have mapped the old files, so they are not overwritten. Weights first.
            for each in sorted(Path(made).iterdir(), reverse=True):
                each.replace(path.parent / each.name)
    except ImportError:
        raise ModelLoadError("batchery export needs: pip install 'batchery[onnx]'") from None
    except Exception as error:
        # Around torch's are lines on what to read and whom to write.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ModelLoadError(
            f"model {str(folder)!r}: no file that is right can be made of it: {reason(cause)}"
        ) from error
    return path


def _write(text_model: TextModel, path: Path) -> None:
    model = text_model.model
    # Others choose their kernel by the lengths, and torch cannot export the choice.
    model.set_attn_implementation("eager")
    taken = inspect.signature(model.forward).parameters
    made = text_model.tokenizer(["a", "b"], return_tensors="pt")
    inputs = {name: tensor for name, tensor in made.items() if name in taken}
    lengths = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    has_logits = text_model.reading == "logits"
    with warnings.catch_warnings():
        # They are about calls within torch.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=inputs,
            output_names=["logits" if has_logits else "last_hidden_state"],
            dynamic_shapes=dict.fromkeys(inputs, lengths),
            dynamo=True,
            verbose=False,
        )
