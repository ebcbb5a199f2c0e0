"""The usual loop: a DataLoader whose processes decode, and one model that takes its batches."""

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor, AutoModel
from transformers.image_utils import load_image

from benchmarks.peers.text_peer import encode, serve, take_stdout


class Pictures(Dataset[torch.Tensor]):
    """Files, read and processed one by one."""

    def __init__(self, folder: Path, names: Sequence[str], processor: Any) -> None:
        self._folder, self._names, self._processor = folder, names, processor

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, place: int) -> torch.Tensor:
        image = load_image(str(self._folder / self._names[place]))
        pixels: torch.Tensor = self._processor(images=image, return_tensors="pt").pixel_values[0]
        return pixels


def main() -> None:
    """Answers requests with the names of files and a batch size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    options, out = parser.parse_args(), take_stdout()
    load: Any = AutoImageProcessor.from_pretrained
    processor, model = load(options.model), AutoModel.from_pretrained(options.model).eval()

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        pictures = Pictures(options.pictures, request["names"], processor)
        started_s = time.perf_counter()
        vectors = []
        with torch.inference_mode():
            for batch in DataLoader(
                pictures, batch_size=request["batch_size"], num_workers=options.workers
            ):
                found = model(pixel_values=batch).pooler_output
                vectors.append(torch.nn.functional.normalize(found, dim=-1).numpy())
        results = [each for rows in vectors for each in encode(rows, [0] * len(rows))]
        took_s = time.perf_counter() - started_s
        kept = results if request.get("keep") else []
        return {"seconds": took_s, "results": [each.decode() for each in kept]}

    serve(answer, out)


if __name__ == "__main__":
    # Each process of the loader has one core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
