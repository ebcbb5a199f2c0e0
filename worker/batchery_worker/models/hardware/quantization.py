"""Weights of eight bits, by torchao: less memory, and the same forward passes."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from batchery.settings import ModelSettings

logger = logging.getLogger(__name__)

#: Minimum compute capability of CUDA devices with float8.
FLOAT8_CAPABILITY = (8, 9)

#: The features of a layer must be a multiple of this: kernels for eight bits take no others.
FEATURE_MULTIPLE = 16


def quantize(settings: ModelSettings, model: Any, device: torch.device) -> None:
    """Makes the weights of a model's linear layers smaller, if its settings say so.

    Heads and embeddings stay as they are.

    Each output of a layer has its own scale. The layers go to the device one by one, so that it
    never holds all unquantized weights.

    Raises:
        ValueError: torchao is missing, the device has no float8, or there is no such layer.
    """
    how = settings.quantize
    if how == "none":
        return
    option = f"quantize = {how!r}"
    if how == "float8":
        _check_float8(option, device)
    if not any(map(_fits, model.base_model.modules())):
        raise ValueError(f"{option}, but it has no plain linear layers; set it to none")
    try:
        from torchao import quantization
    except ImportError:
        raise ValueError(f"{option} needs torchao: pip install 'batchery[quantize]'") from None
    kinds = {"int8": "Int8WeightOnlyConfig", "float8": "Float8WeightOnlyConfig"}
    config, before_bytes = getattr(quantization, kinds[how])(), weights_bytes(model)
    quantization.quantize_(
        model.base_model, config, filter_fn=lambda layer, _: _fits(layer), device=device
    )
    logger.info(
        "model %s: weights in %s, %.1f MiB of %.1f",
        *(settings.model, how, weights_bytes(model) / 2**20, before_bytes / 2**20),
    )


def weights_bytes(model: nn.Module) -> int:
    """Memory of the weights of a model, quantized or not."""
    return sum(map(_bytes, model.parameters()))


def sum_cpu_bytes(parts: Iterable[Any]) -> int:
    """Main memory of the weights and buffers of those parts that are modules."""
    tensors = [
        tensor
        for part in parts
        if isinstance(part, nn.Module)
        for tensor in (*part.parameters(), *part.buffers())
        if tensor.device.type == "cpu"
    ]
    return sum(map(_bytes, {id(each): each for each in tensors}.values()))


def _check_float8(option: str, device: torch.device) -> None:
    least = ".".join(map(str, FLOAT8_CAPABILITY))
    needs = f"{option} needs a CUDA device of compute capability {least} or more"
    if device.type != "cuda":
        raise ValueError(f"{needs}, not {device}; int8 runs anywhere")
    has = torch.cuda.get_device_capability(device)
    if has < FLOAT8_CAPABILITY:
        raise ValueError(f"{needs}; {device} has {has[0]}.{has[1]}; int8 runs there")


def _fits(layer: nn.Module) -> bool:
    # Subclasses of Linear may do more than multiply.
    return type(layer) is nn.Linear and not (
        layer.in_features % FEATURE_MULTIPLE or layer.out_features % FEATURE_MULTIPLE
    )


def _bytes(tensor: Any) -> int:
    # A tensor of torchao contains several tensors.
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        parts = [getattr(tensor, name) for name in names]
        return sum(_bytes(part) for part in parts if isinstance(part, torch.Tensor))
    return int(tensor.numel() * tensor.element_size())
