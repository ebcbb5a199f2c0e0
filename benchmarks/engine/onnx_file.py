"""Writes the ONNX file of a saved model into its folder: `python -m ... FOLDER`."""

import inspect
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers


def export_onnx(folder: Path, head: str = "") -> Path:
    """Writes `onnx/model.onnx`, in fp32.

    Args:
        folder: With the model and its tokenizer.
        head: As transformers calls it, such as `SequenceClassification`; none if empty.
    """
    auto = getattr(transformers, f"AutoModel{head and f'For{head}'}")
    # Other attentions choose their kernel by the lengths, and torch cannot export the choice.
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    taken = inspect.signature(model.forward).parameters
    made = transformers.AutoTokenizer.from_pretrained(folder)(["a", "b"], return_tensors="pt")
    inputs = {name: tensor for name, tensor in made.items() if name in taken}
    lengths = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    model.config.use_cache = False
    path = folder / "onnx" / "model.onnx"
    path.parent.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        # They are about calls within torch.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (),
            path,
            kwargs=inputs,
            output_names=["logits" if head else "last_hidden_state"],
            dynamic_shapes=dict.fromkeys(inputs, lengths),
            dynamo=True,
            verbose=False,
        )
    return path


if __name__ == "__main__":
    export_onnx(Path(sys.argv[1]))
