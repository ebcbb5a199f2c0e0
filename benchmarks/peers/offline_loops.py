"""Loops over transformers and torch that anyone could write: the measure for everything else.

Each tokenizes, computes, and encodes the same results as a worker stores. Nothing of Batchery.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer

from benchmarks.peers import offline_packed
from benchmarks.peers.offline_packed import Layout
from benchmarks.peers.text_peer import arguments, encode, serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: What MiniLM's makers cut its texts at, in tokens.
MAX_LENGTH = 256

#: Texts of a batch that is not cut by tokens.
BATCH_SIZE = 64


@dataclass(slots=True)
class Tally:
    """What one pass over all texts took."""

    tokens: int = 0
    computed_tokens: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, since_s: float) -> float:
        """Counts the time since then; returns now."""
        now_s = time.perf_counter()
        self.stages_s[stage] = self.stages_s.get(stage, 0.0) + now_s - since_s
        return now_s


class Loops:
    """One tokenizer and one model, on one device."""

    def __init__(self, model: str, device: str, dtype: str, budgets: Mapping[str, int]) -> None:
        """Loads the model.

        Args:
            model: Folder with its files.
            device: As torch spells it.
            dtype: One of `DTYPES`.
            budgets: Tokens of a batch, by the loops that have a budget.
        """
        self._budgets = budgets
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model: Any = AutoModel.from_pretrained(model, dtype=DTYPES[dtype])
        self.model.to(self.device).eval()
        self._attention = ""
        if self.device.type == "cuda":
            # cuDNN plans each new shape on the host, for tens of milliseconds.
            torch.backends.cuda.enable_cudnn_sdp(False)

    def run(self, loop: str, texts: Sequence[str]) -> tuple[list[bytes], Tally]:
        """Embeds all texts.

        Args:
            loop: One of `LOOPS`.
            texts: In the order of their results.
        """
        forward = LOOPS[loop]
        packs = forward is Loops.packed
        self._attend(offline_packed.NAME if packs else "sdpa")
        tally = Tally()
        results: list[bytes] = [b""] * len(texts)
        if loop == "side by side":
            self._run_side_by_side(list(self._batches("packed", texts, tally)), results, tally)
            return results, tally
        waiting: tuple[list[int], list[int], Tensor, Any] | None = None

        def finish(batch: tuple[list[int], list[int], Tensor, Any]) -> None:
            places, lengths, vectors, event = batch
            began_s = time.perf_counter()
            if event is not None:
                event.synchronize()
            began_s = tally.add("forward", began_s)
            for place, result in zip(places, encode(vectors.numpy(), lengths), strict=True):
                results[place] = result
            tally.add("encode", began_s)

        for places, ids in self._batches(loop, texts, tally):
            began_s = time.perf_counter()
            lengths = [len(each) for each in ids]
            tally.tokens += sum(lengths)
            tally.computed_tokens += sum(lengths) if packs else max(lengths) * len(lengths)
            vectors, event = self._fetch(forward(self, ids))
            tally.add("forward", began_s)
            # On a GPU the one before is encoded while this one is computed.
            if waiting is not None:
                finish(waiting)
            waiting = (places, lengths, vectors, event)
        if waiting is not None:
            finish(waiting)
        return results, tally

    def _attend(self, attention: str) -> None:
        # It takes half a millisecond, and a single text is a run of its own.
        if attention != self._attention:
            self.model.set_attn_implementation(attention)
            self._attention = attention

    def _run_side_by_side(
        self,
        batches: Sequence[tuple[list[int], list[list[int]]]],
        results: list[bytes],
        tally: Tally,
    ) -> None:
        """Packed batches, one on each of torch's threads, instead of all threads on one batch."""

        @torch.inference_mode()
        def vectors(batch: tuple[list[int], list[list[int]]]) -> Tensor:
            torch.set_num_threads(1)
            return self.packed(batch[1])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            began_s = time.perf_counter()
            for (places, ids), batch in zip(batches, pool.map(vectors, batches), strict=True):
                lengths = [len(each) for each in ids]
                tally.tokens += sum(lengths)
                tally.computed_tokens += sum(lengths)
                began_s = tally.add("forward", began_s)
                for place, result in zip(places, encode(batch.numpy(), lengths), strict=True):
                    results[place] = result
                began_s = tally.add("encode", began_s)

    def singles(self, texts: Sequence[str], seconds: float) -> dict[str, Any]:
        """Texts one by one, again and again, for so long and two at least; how long each took."""
        taken_s: list[float] = []
        began_s = ended_s = time.perf_counter()
        for text in itertools.cycle(texts):
            self.run("naive", [text])
            started_s, ended_s = ended_s, time.perf_counter()
            taken_s.append(ended_s - started_s)
            if ended_s - began_s >= seconds and len(taken_s) > 1:
                break
        return {"taken_s": taken_s, "seconds": ended_s - began_s}

    def _fetch(self, vectors: Tensor) -> tuple[Tensor, Any]:
        if self.device.type != "cuda":
            return vectors, None
        there = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
        there.copy_(vectors, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return there, event

    def _batches(
        self, loop: str, texts: Sequence[str], tally: Tally
    ) -> Iterator[tuple[list[int], list[list[int]]]]:
        if loop == "naive":
            for start in range(0, len(texts), BATCH_SIZE):
                ids = self._tokenize(texts[start : start + BATCH_SIZE], tally)
                yield list(range(start, start + len(ids))), ids
            return
        ids = self._tokenize(texts, tally)
        order = sorted(range(len(ids)), key=lambda place: len(ids[place]), reverse=True)
        places: list[int] = []
        room = 0
        for place in order:
            # Packed, a text takes its own tokens; padded, as many as the longest, which is first.
            takes = len(ids[place] if loop == "packed" or not places else ids[places[0]])
            if places and takes > room:
                yield places, [ids[each] for each in places]
                places = []
            if not places:
                room, takes = self._budgets[loop], len(ids[place])
            places.append(place)
            room -= takes
        if places:
            yield places, [ids[each] for each in places]

    def _tokenize(self, texts: Sequence[str], tally: Tally) -> list[list[int]]:
        began_s = time.perf_counter()
        ids: list[list[int]] = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=MAX_LENGTH,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        tally.add("tokenize", began_s)
        return ids

    def padded(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Vectors of one batch, (B, D) float32, through a padded shape."""
        tokens = pad_sequence([torch.tensor(each) for each in ids], batch_first=True)
        mask = pad_sequence([torch.ones(len(each)) for each in ids], batch_first=True)
        tokens, mask = self._to_device(tokens), self._to_device(mask)
        hidden = self.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1)
        return normalize((hidden.float() * weights).sum(1) / weights.sum(1))

    def packed(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Vectors of one batch, (B, D) float32, with the texts one behind the other."""
        lengths = [len(each) for each in ids]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        offline_packed.attention.layout = Layout(self._to_device(offsets), lengths)
        tokens = self._to_device(torch.tensor([token for each in ids for token in each]))
        places = self._to_device(torch.cat([torch.arange(length) for length in lengths]))
        hidden = self.model(input_ids=tokens[None], position_ids=places[None]).last_hidden_state
        means = torch.segment_reduce(
            hidden[0].float(), "mean", lengths=self._to_device(torch.tensor(lengths)), unsafe=True
        )
        return normalize(means)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


#: Name of a loop -> its forward pass. naive: in the order of arrival, 64 at a time; budget: sorted
#: by length, within so many tokens; packed: the same without padding; side by side: packed, a batch
#: on each of a CPU's cores.
LOOPS: Mapping[str, Callable[[Loops, Sequence[Sequence[int]]], Tensor]] = {
    "naive": Loops.padded,
    "budget": Loops.padded,
    "packed": Loops.packed,
    "side by side": Loops.packed,
}


def main() -> None:
    """Answers runs, and questions for the speed of a matrix product."""
    options = arguments()
    budgets = {"budget": options.padded_tokens, "packed": options.packed_tokens}
    loops = Loops(options.model, options.device, options.dtype, budgets)

    @torch.inference_mode()
    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if request["loop"] == "single":
            return loops.singles(request["texts"], request["seconds"])
        started_s, used_s = time.perf_counter(), time.process_time()
        results, tally = loops.run(request["loop"], request["texts"])
        return {
            "seconds": time.perf_counter() - started_s,
            "cpu_s": time.process_time() - used_s,
            "tokens": tally.tokens,
            "computed_tokens": tally.computed_tokens,
            "stages_s": tally.stages_s,
            "results": [each.decode() for each in results] if request.get("keep") else [],
        }

    serve(answer)


if __name__ == "__main__":
    main()
