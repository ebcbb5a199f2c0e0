"""What hears speech in windows, as transformers' pipeline does it: Whisper, or a CTC model."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from batchery.errors import InvalidItem
from batchery_worker.models.audio.recordings import Window, fills_up
from batchery_worker.models.inputs import TranscriptionKeywords

#: What a model made of a window, as JSON can write it: its `tokens`, the `stride` that goes with
#: them, and of Whisper perhaps `times` of the tokens and `language`.
Heard = dict[str, Any]


#: What windows of a recording say, put together: `text` and `language`, and, where the job asks for
#: them, `segments` and `words`. All segments but the last one stay as they are when more windows
#: come, and their texts make up the whole one.
Transcript = dict[str, Any]


class PipedModel:
    """A model behind a pipeline of transformers."""

    def __init__(self, pipe: Any) -> None:
        """Takes a pipeline of transformers."""
        self._pipe = pipe
        self._model: Any = pipe.model
        self._rate: int = pipe.feature_extractor.sampling_rate

    def _collate(self, windows: Sequence[Window]) -> dict[str, Any]:
        """Inputs of the pipeline for a batch, padded to the longest window."""
        rows = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(each.values) for each in windows],
            batch_first=True,
            padding_value=self._pipe.feature_extractor.padding_value,
        )
        lengths = torch.tensor([each.length for each in windows])
        return {
            self._model.main_input_name: rows.to(self._pipe.device, self._model.dtype),
            "attention_mask": (torch.arange(rows.shape[-1]) < lengths[:, None]).int(),
            "stride": [each.stride for each in windows],
            "is_last": True,
        }

    def _join(self, heard: Sequence[Heard], **options: Any) -> tuple[str, list[Any]]:
        """The text of windows, and its parts, by the pipeline."""
        outputs = []
        for each in heard:
            # Transformers itself would put the language there, but no time for it.
            first = [each["language"]] if "language" in each else []
            output = {
                "tokens": torch.tensor([[*first, *each["tokens"]]], dtype=torch.long),
                "stride": tuple(each["stride"]),
                "is_last": True,
            }
            if "times" in each:
                output["token_timestamps"] = torch.tensor([[*(0.0 for _ in first), *each["times"]]])
            outputs.append(output)
        found = self._pipe.postprocess(outputs, **options)
        return found["text"], found.get("chunks", [])


class Whisper(PipedModel):
    """Whisper and its distillations: an encoder, and `generate` of transformers.

    Windows overlap, and are put together as the pipeline's `chunk_length_s` does it. The sequential
    rule, by which `generate` takes a whole recording, begins each window where the one before has
    ended a sentence, and may use what it said: no two windows of a recording can be heard at the
    same time then. Up to the length of a window the results of both are the same.
    """

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe)
        config = self._model.generation_config
        knows_all = getattr(config, "is_multilingual", True)
        languages = getattr(config, "lang_to_id", None) if knows_all else None
        #: The token of each language, by its code; empty if the model knows one only.
        self._languages = {name.strip("<|>"): token for name, token in (languages or {}).items()}
        self._codes = {token: code for code, token in self._languages.items()}
        self._has_times = getattr(config, "no_timestamps_token_id", None) is not None
        self._has_words = getattr(config, "alignment_heads", None) is not None
        _time_rows_alone(self._model)

    def check(self, options: TranscriptionKeywords) -> TranscriptionKeywords:
        """Returns keywords of a job as this model follows them, the language as a code.

        Raises:
            InvalidItem: It cannot.
        """
        timestamps = options.timestamps or ("segment" if self._has_times else "none")
        can_tell = {"none": True, "segment": self._has_times, "word": self._has_words}
        if not can_tell[timestamps]:
            raise InvalidItem(
                f"keyword timestamps = {timestamps!r}: the model's generation config does not say"
                " how it tells them"
            )
        if not self._languages and (options.language or options.task != "transcribe"):
            raise InvalidItem("keywords language and task: the model knows one language only")
        language = options.language and options.language.lower()
        language = language and TO_LANGUAGE_CODE.get(language, language)
        if language and language not in self._languages:
            there_are = ", ".join(sorted(self._languages))
            raise InvalidItem(f"keyword language = {language!r:.80}: there are {there_are}")
        if options.prompt:
            self._prompt(options.prompt)
        return options.model_copy(update={"timestamps": timestamps, "language": language})

    def group(self, options: TranscriptionKeywords, window: Window) -> Any:  # noqa: ARG002
        """What windows have in common that may share a pass: all keywords but the language."""
        return options.model_copy(update={"language": None})

    def hear(
        self, windows: Sequence[Window], options: Sequence[TranscriptionKeywords]
    ) -> list[Heard]:
        """Runs windows of one group through the model.

        Args:
            windows: One or more.
            options: The keywords of the job of each.
        """
        first, inputs = options[0], self._collate(windows)
        given: dict[str, Any] = {"num_beams": 1}
        if first.timestamps != "none":
            given["return_timestamps"] = "word" if first.timestamps == "word" else True
        if first.temperature:
            given["temperature"] = first.temperature
        if first.prompt:
            given["prompt_ids"] = self._prompt(first.prompt).to(self._pipe.device)
        languages = []
        if self._languages:
            languages = self._find_languages(inputs[self._model.main_input_name], options)
            given |= {"language": languages, "task": first.task}
        attention = self._model.config._attn_implementation
        try:
            found = self._pipe.forward(inputs, **given)
        finally:
            # For the times of words, transformers changes it for good.
            self._model.config._attn_implementation = attention
        heard = []
        for row, window in enumerate(windows):
            each = {"tokens": self._strip(found["tokens"][row].tolist()), "stride": window.stride}
            if first.timestamps == "word":
                each["times"] = found["token_timestamps"][row].tolist()
            if languages:
                each["language"] = self._languages[languages[row]]
            heard.append(each)
        return heard

    def _prompt(self, text: str) -> Tensor:
        """The tokens of a prompt. Raises InvalidItem."""
        try:
            tokens: Tensor = self._pipe.tokenizer.get_prompt_ids(text, return_tensors="pt")
        except ValueError as error:
            raise InvalidItem(f"keyword prompt: {error}") from None
        return tokens

    @torch.inference_mode()
    def _find_languages(
        self, features: Tensor, options: Sequence[TranscriptionKeywords]
    ) -> list[str]:
        """The language of each window, as `generate` would find it, in codes."""
        languages = [each.language for each in options]
        rows = [row for row, language in enumerate(languages) if language is None]
        if rows:
            found = self._model.detect_language(input_features=features[rows]).tolist()
            for row, token in zip(rows, found, strict=True):
                languages[row] = self._codes[token]
        return [each for each in languages if each]

    def _strip(self, tokens: list[int]) -> list[int]:
        """Without the padding behind a text that is shorter than another one of its batch."""
        padding = {self._pipe.tokenizer.pad_token_id, self._model.generation_config.pad_token_id}
        while tokens and tokens[-1] in padding:
            tokens.pop()
        return tokens

    def put_together(
        self, heard: Sequence[Heard], duration_s: float, options: TranscriptionKeywords
    ) -> Transcript:
        """Puts the first windows of a recording together, or all of them."""
        is_timed = options.timestamps != "none"
        text, chunks = self._join(heard, return_timestamps=is_timed or None)
        found: Transcript = {"text": text, "language": self._codes.get(heard[0].get("language"))}
        if is_timed:
            found["segments"] = _parts(chunks, duration_s)
        if options.timestamps == "word":
            found["words"] = _parts(self._join(heard, return_timestamps="word")[1], duration_s)
        return found


def _time_rows_alone(model: Any) -> None:
    """Has a Whisper of transformers find the times of tokens row by row.

    They come from the attention between tokens and sound, which transformers scales over all tokens
    of a batch. A row that ended before others would have that of its padding in it.
    """
    extract, end = model._extract_token_timestamps, model.generation_config.eos_token_id

    def extract_each(outputs: Any, heads: Any, *, num_frames: Any, num_input_ids: int) -> Tensor:
        times = []
        for row, tokens in enumerate(outputs.sequences):
            steps = 1 + int((tokens[num_input_ids:-1] != end).cumprod(0).sum())
            attentions = [
                [layer[row : row + 1] for layer in step]
                for step in outputs.cross_attentions[:steps]
            ]
            alone = type(outputs)(sequences=tokens[None], cross_attentions=attentions)
            frames = None if num_frames is None else num_frames[row : row + 1]
            found = extract(alone, heads, num_frames=frames, num_input_ids=num_input_ids)
            times.append(found[0])
        return torch.nn.utils.rnn.pad_sequence(times, batch_first=True)

    model._extract_token_timestamps = extract_each


class Ctc(PipedModel):
    """Models such as wav2vec2, which say for each frame which letter it is.

    Where a model was trained without an attention mask, which its feature extractor says, padding
    would change what it hears: then only windows of one length share a pass.
    """

    def check(self, options: TranscriptionKeywords) -> TranscriptionKeywords:
        """Returns keywords of a job as this model follows them. Raises InvalidItem."""
        usual = TranscriptionKeywords(timestamps=options.timestamps)
        if options != usual:
            raise InvalidItem("keywords: a CTC model takes timestamps alone")
        return options.model_copy(update={"timestamps": options.timestamps or "segment"})

    def group(self, options: TranscriptionKeywords, window: Window) -> Any:  # noqa: ARG002
        """What windows have in common that may share a pass: the length, if there is no mask."""
        has_mask = fills_up(self._pipe.feature_extractor, self._model.config)
        return None if has_mask else len(window.values)

    def hear(
        self,
        windows: Sequence[Window],
        options: Sequence[TranscriptionKeywords],  # noqa: ARG002 (they change nothing here)
    ) -> list[Heard]:
        """Runs windows of one group through the model; see `Whisper.hear`."""
        found = self._pipe.forward(self._collate(windows))
        rows = zip(found["tokens"].tolist(), found["stride"], strict=True)
        return [{"tokens": row[: stride[0]], "stride": stride} for row, stride in rows]

    def put_together(
        self, heard: Sequence[Heard], duration_s: float, options: TranscriptionKeywords
    ) -> Transcript:
        """Puts the first windows of a recording together, or all of them.

        A segment has the words that begin in one window.
        """
        if options.timestamps == "none":
            return {"text": self._join(heard)[0], "language": None}
        text, chunks = self._join(heard, return_timestamps="word")
        words = _parts(chunks, duration_s)
        unit_s = self._model.config.inputs_to_logits_ratio / self._rate
        strides = (each["stride"] for each in heard)
        lengths = (whole - left - right for whole, left, right in strides)
        ends_s = [end * unit_s for end in accumulate(lengths)]
        by_window: dict[int, list[dict[str, Any]]] = {}
        for word in words:
            by_window.setdefault(bisect_right(ends_s, word["start_s"]), []).append(word)
        segments = [
            {
                "start_s": each[0]["start_s"],
                "end_s": each[-1]["end_s"],
                "text": " " * bool(place) + " ".join(word["text"] for word in each),
            }
            for place, each in enumerate(by_window.values())
        ]
        found = {"text": text, "language": None, "segments": segments}
        return {**found, "words": words} if options.timestamps == "word" else found


def _parts(chunks: Sequence[Mapping[str, Any]], length_s: float) -> list[dict[str, Any]]:
    """Segments or words of the pipeline; where it knows no time, that of the neighbour."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        start_s, end_s = chunk["timestamp"]
        if start_s is None:
            start_s = parts[-1]["end_s"] if parts else 0.0
        end_s = length_s if end_s is None else end_s
        parts.append({"start_s": start_s, "end_s": end_s, "text": chunk["text"]})
    return parts
