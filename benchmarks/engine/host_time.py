"""Python's share of a forward pass: microseconds per pass and per text, by stage.

On a GPU the host only launches, and with short texts it is the limit. Here the device computes
next to nothing: a BERT of one head and eight numbers per token, whose attention returns at once.
What is left is the work of the host, ours and transformers'. Copies to a GPU are missing.

    python -m benchmarks.engine.host_time --json host_time.json
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AttentionInterface, BertConfig, BertModel

from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.forward import attention
from batchery_worker.models.forward.packed import Packed
from batchery_worker.models.hardware.transfers import DeviceToHost, PendingCopy
from batchery_worker.models.text_model import Outputs
from batchery_worker.models.tokenizer import Prepared
from benchmarks.hardware import hardware

LAYERS = (6, 12, 24)
TEXTS = (1, 64)

#: Numbers of a vector in the stages behind the model.
WIDTH = 1024

#: Runs of each stage; the fastest one counts.
REPEATS = 200


def main() -> None:
    """Measures all cases, prints a table; writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(layers, count, options.repeats) for layers in LAYERS for count in TEXTS]
    table = Table(*rows[0], box=box.MARKDOWN)
    for each in rows:
        table.add_row(*map(str, each.values()))
    Console(width=140).print(table)
    if options.json:
        report = {"hardware": hardware(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def row(layers: int, count: int, repeats: int) -> dict[str, Any]:
    """One model, and batches of so many texts: microseconds per pass."""
    model = embedder(layers)
    numbers = np.random.default_rng(1)
    batch: list[Prepared] = [
        np.array([numbers.integers(9, 90, length), np.zeros(length)], dtype=np.int64)
        for length in (8 + number % 9 for number in range(count))
    ]
    packed: Any = model._pass
    inputs, tokens = inputs_of(batch)
    with torch.inference_mode():
        packed.install()
        hidden = torch.zeros(1, tokens, 8)
        attention_us = layers * layer_us(batch, hidden, repeats)
        model.model.set_attn_implementation(bare.__name__)
        bare_us = cost_us(lambda: model.model(**inputs), repeats // 5)
        # From here on, the layers take no time.
        packed._model = lambda **_: SimpleNamespace(last_hidden_state=hidden)
        passed_us = cost_us(lambda: packed.values(batch, "mean"), repeats)
        whole_us = cost_us(lambda: model.forward(batch), repeats)
    values = torch.randn(count, WIDTH)
    results_us = cost_us(lambda: results(model, values, batch), repeats)
    return {
        "layers": layers,
        "texts": count,
        "transformers": round(bare_us),
        "attention": round(attention_us),
        "rows, inputs, pooling": round(passed_us),
        "keywords, scale, copy": round(whole_us - passed_us),
        "ours": round(whole_us + attention_us),
        "ours per text": round((whole_us + attention_us) / count, 1),
        "results per text": round(results_us / count, 1),
    }


def embedder(layers: int) -> EmbeddingModel:
    """A model that was not loaded: it has what a pass needs."""
    model = EmbeddingModel(ModelSettings(kind="embedding", model="none"))
    config = BertConfig(
        vocab_size=99,
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=1,
        intermediate_size=8,
    )
    device = torch.device("cpu")
    bert: Any = BertModel(config)
    bert.eval()
    made: dict[str, Any] = {
        "model": bert,
        "_to_host": DeviceToHost(device),
        "_streams": None,
        "pooling": "mean",
    }
    vars(model).update(made)
    names = ["input_ids", "token_type_ids"]
    options: dict[str, Any] = {"names": names, "padding_position": None, "varlen": True}
    model._pass = Packed(model.model, device, **options)
    return model


def inputs_of(batch: Sequence[Prepared]) -> tuple[dict[str, Tensor], int]:
    """What a packed pass gives to its model, and how many tokens there are."""
    rows = torch.from_numpy(np.concatenate(batch, axis=1))
    places = torch.cat([torch.arange(text.shape[1]) for text in batch])
    names = ("input_ids", "token_type_ids", "position_ids")
    return dict(zip(names, (*rows[:, None], places[None]), strict=True)), len(places)


def layer_us(batch: Sequence[Prepared], hidden: Tensor, repeats: int) -> float:
    """Our attention of one layer, less what any attention must do."""
    lengths = [text.shape[1] for text in batch]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    part = hidden[:, None]
    module = torch.nn.Identity()
    given: dict[str, Any] = {"scaling": 1.0, "is_causal": False, "dropout": 0.0}
    with attention.row_of_texts(attention.Row(lengths, ends)):
        ours_us = cost_us(
            lambda: attention.attention(module, part, part, part, None, **given), repeats
        )
    return ours_us - cost_us(lambda: bare(module, part, part, part, None, **given), repeats)


def bare(_: Any, query: Tensor, __: Any, ___: Any, ____: Any, **_____: Any) -> tuple[Tensor, None]:
    """The least that an attention may be."""
    return query.transpose(1, 2), None


def at_once(query: Tensor, *_: Any, **__: Any) -> Tensor:
    """In the place of CUDA's kernel."""
    return query


def results(model: EmbeddingModel, values: Tensor, batch: Sequence[Prepared]) -> None:
    """From the values of a pass to what is stored."""
    heads = [{"tokens": text.shape[1]} for text in batch]
    model.give_json()
    model.postprocess(Outputs(heads, PendingCopy(values)))


def cost_us(run: Callable[[], Any], repeats: int) -> float:
    """The least time of all runs, in microseconds: nothing else has run meanwhile."""
    least_s = float("inf")
    for _ in range(repeats):
        began_s = time.perf_counter()
        run()
        least_s = min(least_s, time.perf_counter() - began_s)
    return least_s * 1e6


attention.varlen_kernel = lambda: at_once  # type: ignore[assignment]
AttentionInterface.register(bare.__name__, bare)

if __name__ == "__main__":
    main()
