"""Writes the ONNX file of a model in a folder, by torch's exporter, and checks it."""

import inspect
import warnings
from pathlib import Path

import torch
from kombu.utils.imports import symbol_by_name

from batchery.errors import ModelLoadError
from batchery.installer import KINDS
from batchery.settings import ModelSettings
from batchery_worker.models.onnx_session import FILES
from batchery_worker.models.source import reason
from batchery_worker.models.text_model import TextModel
from batchery_worker.models.verification import verify


def export(kind: str, folder: Path) -> Path:
    """Loads a model on the CPU, in fp32, and writes its file beside it.

    Args:
        kind: `embedding` or `classification`.
        folder: With config, tokenizer and safetensors.

    Returns:
        The file, `onnx/model.onnx` in the folder.

    Raises:
        ModelLoadError: The model cannot be loaded or exported, its file is wrong, or a package is
            missing.
    """
    settings = ModelSettings.model_validate(
        {"kind": kind, "model": str(folder), "dtype": "fp32", "forward": "padded"}
    )
    text_model: TextModel = symbol_by_name(KINDS[kind])(settings)
    text_model.load("cpu")
    model = text_model.model
    # Others choose their kernel by the lengths, and torch cannot export the choice.
    model.set_attn_implementation("eager")
    taken = inspect.signature(model.forward).parameters
    made = text_model.tokenizer(["a", "b"], return_tensors="pt")
    inputs = {name: tensor for name, tensor in made.items() if name in taken}
    lengths = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    path = folder / FILES[0]
    path.parent.mkdir(exist_ok=True)
    try:
        with warnings.catch_warnings():
            # They are about calls within torch.
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (),
                path,
                kwargs=inputs,
                output_names=["last_hidden_state" if kind == "embedding" else "logits"],
                dynamic_shapes=dict.fromkeys(inputs, lengths),
                dynamo=True,
                verbose=False,
            )
        # Some code has the lengths of these texts exported as constants, and nothing says so.
        report = verify(settings.model_copy(update={"engine": "onnx", "dtype": "auto"}), "cpu")
        if not report.passed:
            raise ModelLoadError(f"the file's results differ: {report.comparisons[0]}")
    except ImportError:
        raise ModelLoadError("batchery export needs: pip install 'batchery[onnx]'") from None
    except Exception as error:
        path.unlink(missing_ok=True)
        # Around torch's are lines on what to read and whom to write.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise ModelLoadError(
            f"model {str(folder)!r}: no file that is right can be made of it: {reason(cause)}"
        ) from error
    return path
