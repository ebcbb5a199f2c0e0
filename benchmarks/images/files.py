"""Pictures, and a model with random weights that makes vectors of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

#: Of DeiT tiny, with pictures of 224 pixels a side; and of a model for tests of this benchmark.
SIZES = {
    "deit-tiny": {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
}

#: Different pictures; of more, some are the same.
MAX_FILES = 1_000

#: Sizes in pixels, as cameras and shops have them.
PIXELS = ((640, 480), (480, 640), (800, 600), (500, 500))


def save_model(folder: Path, size: str) -> None:
    """Writes a model and its image processor."""
    of: Any = transformers
    sizes = SIZES[size]
    config = of.ViTConfig(**sizes, intermediate_size=4 * sizes["hidden_size"])
    torch.manual_seed(1)
    of.ViTModel(config).save_pretrained(folder)
    of.ViTImageProcessor().save_pretrained(folder)


def draw_pictures(folder: Path, count: int) -> Sequence[str]:
    """Writes JPEG files of blurred noise, as large as photos of their size; returns names."""
    folder.mkdir()
    random = np.random.default_rng(1)
    for number in range(min(count, MAX_FILES)):
        width, height = PIXELS[number % len(PIXELS)]
        coarse = random.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        image.save(folder / f"{number}.jpg", quality=85)
    return [f"{number % MAX_FILES}.jpg" for number in range(count)]
