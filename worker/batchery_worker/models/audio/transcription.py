"""The kind `transcription`: jobs whose windows share passes, told as they are finished."""

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import (
    AutomaticSpeechRecognitionPipeline,
    AutoModelForCTC,
    AutoModelForSpeechSeq2Seq,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CTC_MAPPING_NAMES

from batchery.errors import InvalidItem, ItemError, ItemFailed, OutOfMemory
from batchery.execution.bisect_failures import is_out_of_memory
from batchery.media_settings import MediaSettings
from batchery.model import Advance, StepModel
from batchery.outcomes import Failed
from batchery.settings import ModelSettings
from batchery_worker.models.audio.recordings import Recording, RecordingReader, Window, make_tone
from batchery_worker.models.audio.speech import Ctc, Heard, Whisper
from batchery_worker.models.inputs import TranscriptionKeywords
from batchery_worker.models.media_model import MediaItems
from batchery_worker.models.source import load_tokenizer, loading, reason

logger = logging.getLogger(__name__)

#: What hears speech.
Speech = Whisper | Ctc

#: How long a step may take, in seconds; jobs join, leave and end between two. By how long one took,
#: the next one has room for as many windows as fit: fewer if it took too long, else up to twice.
MAX_STEP_S = 4.0

#: By how much more must have been heard before it is put together again, for those who read along:
#: that takes the longer, the more it is.
GROWTH = 1.2


class SpeechJob:
    """A recording in a slot.

    Attributes:
        slot: Its slot.
        options: The keywords of its job.
        heard: What the model made of its first windows.
        left: The windows that the model has not had.
    """

    def __init__(
        self,
        slot: int,
        recording: Recording,
        pieces: Sequence[Mapping[str, Any]],
        options: TranscriptionKeywords,
        is_streamed: bool,
    ) -> None:
        """Goes on behind pieces."""
        self.slot, self.options = slot, options
        self.heard: list[Heard] = [each for piece in pieces for each in piece["windows"]]
        self.left = recording.windows
        del self.left[: len(self.heard) + len(self.left) - recording.total]
        self._duration_s = recording.duration_s
        self._is_streamed = is_streamed
        #: How many of `heard`, and of the segments made of it, pieces have had.
        self._told_heard = len(self.heard)
        self._told_segments = sum(len(piece["segments"]) for piece in pieces)
        #: How much must be heard before it is put together for those who read along.
        self._due = 1

    def take_piece(self, speech: Speech) -> dict[str, Any] | None:
        """What its readers get now; None if nobody reads."""
        if not self._is_streamed:
            return None
        segments: Sequence[Mapping[str, Any]] = ()
        if len(self.heard) >= self._due or not self.left:
            self._due = int(len(self.heard) * GROWTH) + 1
            found = speech.put_together(self.heard, self._duration_s, self.options)
            segments = found.get("segments", ())
        return self._piece(segments[:-1] if self.left else segments)

    def take_rest(self) -> list[dict[str, Any]] | None:
        """What it must have to go on later, and no piece has said."""
        return [self._piece([])] if self._told_heard < len(self.heard) else None

    def _piece(self, segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        new, windows = segments[self._told_segments :], self.heard[self._told_heard :]
        self._told_segments += len(new)
        self._told_heard = len(self.heard)
        text = "".join(each["text"] for each in new)
        return {"text": text, "segments": list(new), "windows": windows}

    def result(self, speech: Speech) -> dict[str, Any]:
        """In the shape of `batchery.Transcription`."""
        found = speech.put_together(self.heard, self._duration_s, self.options)
        return {**found, "duration_s": self._duration_s}


class TranscriptionModel(MediaItems, StepModel):
    """Writes down what is said in recordings, with Whisper and its like, or a CTC model.

    Recordings are cut into windows, and each step takes windows of all jobs in turn, so that a
    short recording does not wait for a long one. Windows of jobs with the same keywords share a
    pass through the encoder, and the steps of the decoder; see `Whisper` and `Ctc`.

    Items: a recording, as bytes or as what says where they are. Keywords of a job: see
    `TranscriptionKeywords`. A result has the shape of `batchery.Transcription`. Pieces have `text`
    and `segments`, what has become final since the last one, and `windows`, by which a job goes on
    elsewhere where it was.
    """

    Reader = RecordingReader

    keywords = TranscriptionKeywords

    trained_part = ("head", "transcription")

    resumes = True

    def __init__(self, settings: ModelSettings, media: MediaSettings | None = None) -> None:
        super().__init__(settings, media)
        self.slots = settings.slots or self.slots
        #: By slot; those whose turn is over are behind the others.
        self._jobs: dict[int, SpeechJob] = {}
        #: Maximum number of windows in a step.
        self._room = 1

    def load(self, device: str) -> None:
        """Loads the model.

        Raises:
            ModelLoadError: There is no model, or none that hears speech; one line says which.
            DeviceUnavailable: There is no such device.
        """
        with loading(self.settings.model):
            self._open(device)
            pipe = AutomaticSpeechRecognitionPipeline(
                model=self.model,
                tokenizer=load_tokenizer(self._source),
                feature_extractor=self.reader.processor,
                device=self._device,
            )
            is_whisper = self.model.config.model_type == "whisper"
            self._speech: Speech = Whisper(pipe) if is_whisper else Ctc(pipe)
        # It would say of each recording that it has not ended yet.
        logging.getLogger("transformers.models.whisper").setLevel(logging.ERROR)
        logger.info("model %s: %d slots on %s", self.settings.model, self.slots, self._device)

    def _choose_class(self, config: Any) -> Any:
        if config.model_type == "whisper":
            return AutoModelForSpeechSeq2Seq
        is_ctc = config.model_type in MODEL_FOR_CTC_MAPPING_NAMES
        if is_ctc and hasattr(config, "inputs_to_logits_ratio"):
            return AutoModelForCTC
        raise ValueError(
            f"is a {config.model_type}, and transcription takes Whisper, or a CTC model of"
            " waveforms such as wav2vec2; name one, or choose another kind"
        )

    def warm_up(self) -> list[bytes]:
        """A second of sound."""
        return [make_tone(self.reader.processor.sampling_rate)]

    def _read_keywords(self, keywords: Mapping[str, Any]) -> TranscriptionKeywords:
        return self._speech.check(super()._read_keywords(keywords))

    def tokens(self, prepared: Recording) -> int:
        """Its windows."""
        return prepared.total

    def join(self, slot: int, prepared: Recording, pieces: Sequence[Any], **keywords: Any) -> None:
        """Takes a job in; see `StepModel.join`."""
        options = self._read_keywords(keywords)
        self._jobs[slot] = SpeechJob(slot, prepared, pieces, options, self.is_streamed)

    def leave(self, slot: int) -> list[dict[str, Any]] | None:
        """Drops a job; see `StepModel.leave`."""
        return self._jobs.pop(slot).take_rest()

    def step(self) -> list[Advance]:
        """Has the next windows heard, of all jobs in turn.

        Where the memory is short, the next steps have fewer of them.
        """
        # Those that came with all their pieces, but without their results.
        whole = [job for job in self._jobs.values() if not job.left]
        advances = [each for job in whole for each in self._advance(job, has_news=False)]
        chosen = self._choose()
        if not chosen:
            return advances
        began_s = time.perf_counter()
        try:
            heard = self._speech.hear(
                [window for _, window in chosen], [job.options for job, _ in chosen]
            )
        except Exception as error:
            # The latter is what transformers says of keywords that a model cannot follow.
            if not is_out_of_memory(error) and not isinstance(error, ValueError):
                raise
            kind = OutOfMemory if is_out_of_memory(error) else InvalidItem
            return advances + self._shrink([job for job, _ in chosen], kind(reason(error)))
        self._resize(len(chosen), time.perf_counter() - began_s)
        for (job, _), each in zip(chosen, heard, strict=True):
            job.heard.append(each)
            del job.left[0]
        in_turn = dict.fromkeys(job for job, _ in chosen)
        return advances + [each for job in in_turn for each in self._advance(job)]

    def _choose(self) -> list[tuple[SpeechJob, Window]]:
        """The next windows: one of each job, then another one, as long as there is room.

        They are of one group: that of the job whose turn it is.
        """
        lines = [(job, job.left[: self._room]) for job in self._jobs.values()]
        in_turn = [
            (self._speech.group(job.options, windows[place]), job, windows[place])
            for place in range(self._room)
            for job, windows in lines
            if place < len(windows)
        ]
        fit = [(job, window) for group, job, window in in_turn if group == in_turn[0][0]]
        return fit[: self._room]

    def _resize(self, windows: int, took_s: float) -> None:
        """Changes the room of steps by how long one took."""
        fit = int(windows * MAX_STEP_S / took_s)
        if took_s > MAX_STEP_S:
            self._room = max(1, fit)
        else:
            self._room = min(max(fit, self._room), 2 * self._room, self.slots)

    def _shrink(self, jobs: Sequence[SpeechJob], failure: ItemError) -> list[Advance]:
        """Has fewer windows in a step; a job whose window fails alone, fails."""
        self._room = max(1, len(jobs) // 2)
        if len(jobs) > 1:
            return []
        (job,) = jobs
        del self._jobs[job.slot]
        return [Advance(job.slot, outcome=Failed(failure))]

    def _advance(self, job: SpeechJob, *, has_news: bool = True) -> list[Advance]:
        """What became of a job, which goes behind the others, or has ended."""
        del self._jobs[job.slot]
        advances = []
        try:
            if has_news:
                advances.append(Advance(job.slot, job.take_piece(self._speech)))
            if job.left:
                self._jobs[job.slot] = job
            else:
                advances.append(Advance(job.slot, outcome=job.result(self._speech)))
        except Exception as error:  # noqa: BLE001 - transformers raises any for odd tokens
            problem = f"audio: what was heard cannot be put together: {reason(error)}"
            return [Advance(job.slot, outcome=Failed(ItemFailed(problem)))]
        return advances
