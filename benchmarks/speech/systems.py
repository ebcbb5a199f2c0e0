"""Ways to transcribe recordings with one model, and what each of them pads."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from batchery.execution.batch import prepare
from batchery.execution.steps import SlotItem, Slots
from batchery.model import GOES_ON
from batchery.settings import ModelSettings
from batchery_worker.models.audio.decoding import decode_audio
from batchery_worker.models.audio.transcription import TranscriptionModel

#: Length of a recording that no benchmark has, in seconds.
ENDLESS_S = 1e6


class Counted:
    """Counts what a Whisper computes, and how much of it is padding.

    A row of a pass is a window, or the rest of one: where a sentence ends within it, transformers
    goes on from there.
    """

    def __init__(self) -> None:
        self.passes = self.rows = self.tokens = self.computed_tokens = 0

    @contextmanager
    def count(self, model: Any) -> Iterator[None]:
        """While this lasts."""
        generate = model.generate_with_fallback

        def counted(*given: Any, **options: Any) -> Any:
            found = generate(*given, **options)
            lengths = [len(each) for each in found[0]]
            self.passes += 1
            self.rows += len(lengths)
            self.tokens += sum(lengths)
            self.computed_tokens += len(lengths) * max(lengths)
            return found

        model.generate_with_fallback = counted
        try:
            yield
        finally:
            del model.generate_with_fallback

    def row(self, sound_s: float, window_s: float, took_s: float) -> dict[str, Any]:
        """The figures of a run over so many seconds of sound."""
        return {
            "sound_per_s": round(sound_s / took_s, 2),
            "took_s": round(took_s, 2),
            "passes": self.passes,
            "rows": self.rows,
            "silence": round(1 - sound_s / (self.rows * window_s), 3),
            "ended_rows": round(1 - self.tokens / max(1, self.computed_tokens), 3),
        }


class Systems:
    """One model, in each of the ways."""

    def __init__(self, folder: Path, device: str, dtype: Any, slots: int) -> None:
        settings = ModelSettings(kind="transcription", model=str(folder), slots=slots, dtype=dtype)
        self._model = TranscriptionModel(settings)
        self._model.load(device)
        make: Any = transformers.pipeline
        self._pipe = make(
            "automatic-speech-recognition", model=str(folder), device=device, dtype=dtype_of(dtype)
        )
        self._slots = slots
        self.ways: dict[str, Callable[[Sequence[bytes]], list[str]]] = {
            "one by one": self._one_by_one,
            "fixed batches": self._in_batches,
            "slots": self._in_slots,
        }

    def measure(self, way: str, recordings: Sequence[bytes], sound_s: float) -> dict[str, Any]:
        """Transcribes recordings; returns the figures, and the texts."""
        counted = Counted()
        speech: Any = self._model
        pipe = speech._speech._pipe if way == "slots" else self._pipe
        with counted.count(pipe.model):
            began_s = time.perf_counter()
            texts = self.ways[way](recordings)
            took_s = time.perf_counter() - began_s
        window_s = float(pipe.feature_extractor.chunk_length)
        return {**counted.row(sound_s, window_s, took_s), "texts": texts}

    def _one_by_one(self, recordings: Sequence[bytes]) -> list[str]:
        return [self._run(self._read(each), 1)["text"] for each in recordings]

    def _in_batches(self, recordings: Sequence[bytes]) -> list[str]:
        found = self._run([self._read(each) for each in recordings], self._slots)
        return [each["text"] for each in found]

    def _run(self, inputs: Any, batch_size: int) -> Any:
        return self._pipe(
            inputs,
            batch_size=batch_size,
            chunk_length_s=self._pipe.feature_extractor.chunk_length,
            return_timestamps=True,
            generate_kwargs={"num_beams": 1},
            ignore_warning=True,
        )

    def _read(self, recording: bytes) -> "np.typing.NDArray[np.float32]":
        return decode_audio(recording, self._pipe.feature_extractor.sampling_rate, ENDLESS_S)

    def _in_slots(self, recordings: Sequence[bytes]) -> list[str]:
        slots: Slots[int] = Slots(self._model, self._slots)
        for at, prepared in enumerate(prepare(self._model, recordings, {})):
            slots.add(SlotItem(at, prepared, {}, (), is_streamed=False))
        texts: dict[int, str] = {}
        while len(texts) < len(recordings):
            for at, _, outcome in slots.step():
                if outcome is not GOES_ON:
                    texts[at] = outcome["text"]
        return [texts[at] for at in range(len(recordings))]


def dtype_of(name: str) -> Any:
    """What transformers calls a number format."""
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[name]
