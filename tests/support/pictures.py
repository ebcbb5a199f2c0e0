"""Tiny models of pictures with random weights, and pictures of all kinds."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from support.tiny_models import make_tokenizer

#: Saves a tiny model of pictures: `build_vision("clip")`.

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDES = {**LAYERS, "intermediate_size": 48, "initializer_range": 0.3}
VISION = {**SIDES, "image_size": 32, "patch_size": 8}
DETR = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}
LABELS = {0: "cat", 1: "dog", 2: "bird"}
NAMED = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}


def save_vision_model(folder: Path, architecture: str) -> None:
    """Writes a model with its image processor, and its tokenizer if it knows texts.

    Args:
        folder: Where to.
        architecture: `clip`, `siglip`, `dinov2`, `vit`, `vit-labels` or `detr`.
    """
    # Pictures of these models have 32 pixels a side; those of DETR have any size.
    square = {"size": {"height": 32, "width": 32}}
    cropped = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(7)
        model, processor = _make(architecture, square, cropped)
        # Random models give nearly the same for all pictures.
        for name, weight in model.named_parameters():
            if "logit" not in name and weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.3 if weight.dim() == 2 else 0.1)
        if architecture == "detr":
            # Otherwise it sees no objects at all.
            model.class_labels_classifier.bias[-1] -= 4
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    if architecture in ("clip", "siglip"):
        make_tokenizer().save_pretrained(folder)


def _make(architecture: str, square: Any, cropped: Any) -> tuple[Any, Any]:
    of: Any = transformers
    text = {**SIDES, "vocab_size": 60, "max_position_embeddings": 64, "eos_token_id": 3}
    text |= {"bos_token_id": 0, "pad_token_id": 1}
    if architecture == "clip":
        config = of.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=24)
        return of.CLIPModel(config), of.CLIPImageProcessor(**cropped)
    if architecture == "siglip":
        config = of.SiglipConfig(text_config=text, vision_config=VISION)
        return of.SiglipModel(config), of.SiglipImageProcessor(**square)
    if architecture == "dinov2":
        return of.Dinov2Model(of.Dinov2Config(**VISION)), of.BitImageProcessor(**cropped)
    if architecture == "vit":
        return of.ViTModel(of.ViTConfig(**VISION)), of.ViTImageProcessor(**square)
    if architecture == "vit-labels":
        config = of.ViTConfig(**VISION, **NAMED)
        return of.ViTForImageClassification(config), of.ViTImageProcessor(**square)
    backbone = of.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], out_features=["stage2"]
    )
    config = of.DetrConfig(backbone_config=backbone, d_model=32, num_queries=12, **DETR, **NAMED)
    sized = {"shortest_edge": 48, "longest_edge": 96}
    return of.DetrForObjectDetection(config), of.DetrImageProcessor(size=sized)


def draw(width: int, height: int, seed: int = 0) -> Image.Image:
    """A picture of coloured blocks and noise."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 255, (5, 7, 3), dtype=np.uint8)
    image = Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)
    noise = random.integers(0, 25, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(np.clip(np.asarray(image, dtype=int) + noise, 0, 255).astype(np.uint8))


def encode(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """The bytes of a picture."""
    file = BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def draw_many(count: int) -> Sequence[bytes]:
    """Pictures of several sizes and formats."""
    sizes = ((64, 48), (48, 64), (100, 40), (37, 91), (32, 32))
    formats = ("PNG", "JPEG", "WEBP")
    return [
        encode(draw(*sizes[each % len(sizes)], seed=each), formats[each % len(formats)])
        for each in range(count)
    ]
