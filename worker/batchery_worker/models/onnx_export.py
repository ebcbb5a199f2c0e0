"""Writes the ONNX file of a model in a folder, by torch's exporter."""

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


def export(kind: str, folder: Path) -> Path:
    """Loads a model on the CPU, in fp32, and writes its file beside it.

    Args:
        kind: `embedding` or `classification`.
        folder: With config, tokenizer and safetensors.

    Returns:
        The file, `onnx/model.onnx` in the folder.

    Raises:
        ModelLoadError: The model cannot be loaded or exported, or a package is missing.
    """
    settings = ModelSettings.model_validate(
        {"kind": kind, "model": str(folder), "dtype": "fp32", "forward": "padded"}
    )
    text_model: TextModel = symbol_by_name(KINDS[kind])(settings)
    text_model.load("cpu")
    model = text_model.model
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
    except ImportError:
        raise ModelLoadError("batchery export needs: pip install 'batchery[onnx]'") from None
    except Exception as error:
        raise ModelLoadError(
            f"model {str(folder)!r}: torch cannot export it: {reason(error)}"
        ) from error
    return path
