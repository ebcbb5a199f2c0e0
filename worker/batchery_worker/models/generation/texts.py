"""The jobs in the slots, and the texts that they write: what can be shown, and where each ends."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchery_worker.models.generation.sampling import Sampling, draw
from batchery_worker.models.inputs import GenerationKeywords

#: Tokens that wait for the rest of a character, at most: it has four bytes, but a token may end one
#: and begin another. With more, the model writes bytes that are none.
MAX_WAITING_TOKENS = 12

#: What decoders write for bytes that are no whole character.
REPLACEMENT = "\ufffd"

#: Decodes tokens.
Decode = Callable[[Sequence[int]], str]


class Prompt(NamedTuple):
    """A prepared item.

    Attributes:
        tokens: Of the prompt.
        options: The job's keywords.
        max_new_tokens: How many tokens its texts may have.
        penalty: Divides the scores of tokens that are there already; 1 for none.
    """

    tokens: list[int]
    options: GenerationKeywords
    max_new_tokens: int
    penalty: float = 1.0


class GrowingText:
    """The text of tokens that come one by one.

    Nothing that was released changes later: the first bytes of a character wait for the others, and
    what may be the beginning of a stop string waits until it is none.

    Attributes:
        text: What was released.
        has_stopped: Whether a stop string has come; then `text` ends before it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stops
        self.text = ""
        self.has_stopped = False
        self._held = ""
        # Tokens are decoded together with the ones before them, on which their spaces depend.
        self._window: list[int] = []
        self._window_text = ""
        self._new = 0

    def add(self, token: int) -> str:
        """Takes the next token; returns what can be released."""
        self._window.append(token)
        self._new += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._new < MAX_WAITING_TOKENS:
            return ""
        if text == self._window_text:
            # A special token has no text, and waits for none. Of many, those in the middle are the
            # ones on which nothing depends.
            self._new = 0
            del self._window[MAX_WAITING_TOKENS:-MAX_WAITING_TOKENS]
        if len(text) <= len(self._window_text):
            return ""
        added = text[len(self._window_text) :]
        del self._window[: -self._new]
        self._window_text, self._new = self._decode(self._window), 0
        return self._release(added)

    def finish(self) -> str:
        """Releases what was held back, as no token comes any more."""
        if self.has_stopped:
            return ""
        rest = self._decode(self._window)[len(self._window_text) :] if self._new else ""
        released = self._release(rest) + self._held
        if self.has_stopped:
            return released
        self.text += self._held
        self._held = ""
        return released

    def _release(self, added: str) -> str:
        held = self._held + added
        found = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            self.has_stopped = True
            released, self._held = held[: min(found)], ""
        else:
            cut = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
            released, self._held = held[:cut], held[cut:]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class SlotText:
    """One text of a job.

    Attributes:
        name: In the batch.
        job: Whose it is.
        choice: Which of the job's texts it is.
        tokens: That the model has written.
        finish_reason: `stop`, or `length`; None while it grows.
        rules: transformers' processors of its logits; None without any.
    """

    rules: Any = None

    def __init__(self, job: "TextJob", choice: int, decode: Decode) -> None:
        self.name = f"{job.serial}/{choice}"
        self.job = job
        self.choice = choice
        self.prompt = job.prompt
        self.tokens: list[int] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self._sent = 0
        self._growing = GrowingText(decode, job.prompt.options.stops)
        self._seen: Tensor | None = None

    def penalize(self, vocabulary: int, device: torch.device) -> None:
        """Marks the tokens that are there already, for a repetition penalty."""
        self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._seen[torch.tensor(self.prompt.tokens + self.tokens, device=device)] = True

    def sampling(self) -> Sampling:
        """What it asks of its next token."""
        options = self.prompt.options
        uniform = 0.0
        if options.temperature:
            uniform = draw(self.job.seed, self.choice, len(self.tokens))
        return Sampling(
            *(options.temperature, options.top_k, options.top_p),
            *(self.prompt.penalty, uniform, self._seen),
        )

    def add(self, token: int, endings: frozenset[int]) -> str:
        """Takes the next token; returns the text that can be shown now."""
        self.tokens.append(token)
        if self._seen is not None:
            self._seen[token] = True
        ends = token in endings and not self.prompt.options.ignore_eos
        # Not every tokenizer calls it special, so its name might be shown.
        released = "" if ends else self._growing.add(token)
        if self._growing.has_stopped or ends:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.prompt.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            released += self._growing.finish()
            # What was held back may have the rest of a stop string.
            self.finish_reason = "stop" if self._growing.has_stopped else self.finish_reason
        return released

    def resume(self, pieces: Sequence[Mapping[str, Any]], endings: frozenset[int]) -> None:
        """Goes on behind the pieces that its readers have."""
        for piece in pieces:
            if piece.get("choice", 0) == self.choice:
                for token in piece["tokens"]:
                    self.add(token, endings)
                self.logprobs += piece.get("logprobs", ())
        self._sent = len(self.tokens)

    def piece(self, released: str) -> dict[str, Any] | None:
        """What its readers get now; None if there is nothing to show.

        Of several texts each says when it ends; the result says so of one.
        """
        ends = self.finish_reason is not None and self.prompt.options.n > 1
        return self.take(released) if released or ends else None

    def take(self, released: str) -> dict[str, Any]:
        """A piece with this text and all tokens that no piece has had."""
        piece: dict[str, Any] = {"text": released, "tokens": self.tokens[self._sent :]}
        if self.prompt.options.n > 1:
            piece["choice"] = self.choice
            if self.finish_reason is not None:
                piece["finish_reason"] = self.finish_reason
        if self.prompt.options.logprobs is not None:
            piece["logprobs"] = self.logprobs[self._sent :]
        self._sent = len(self.tokens)
        return piece

    def result(self) -> dict[str, Any]:
        """Its part of the result."""
        result: dict[str, Any] = {"text": self._growing.text, "finish_reason": self.finish_reason}
        if self.prompt.options.logprobs is not None:
            result["logprobs"] = self.logprobs
        return result


class TextJob:
    """A job in a slot.

    Attributes:
        slot: Its slot.
        serial: A number that no other job of this process has.
        prompt: What it asks.
        seed: Of what is drawn for it.
        texts: One, or as many as the keyword `n` says.
        is_streamed: Whether somebody reads its pieces.
    """

    is_streamed = True

    def __init__(self, slot: int, serial: int, prompt: Prompt, decode: Decode) -> None:
        self.slot = slot
        self.serial = serial
        self.prompt = prompt
        options = prompt.options
        self.seed = random.getrandbits(63) if options.seed is None else options.seed
        self.texts = [SlotText(self, choice, decode) for choice in range(options.n)]
        #: How often it was in a step that was not finite, since its last token.
        self.doubts = 0
        #: Number of tokens that came since it joined.
        self._came = 0
        self._joined_s = time.perf_counter()
        self._first_token_s: float | None = None

    def note_token(self) -> None:
        """Remembers when the first token came, and that it goes on."""
        self.doubts = 0
        self._came += 1
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter()

    @property
    def has_ended(self) -> bool:
        """Whether all its texts have."""
        return all(text.finish_reason is not None for text in self.texts)

    def result(self) -> dict[str, Any]:
        """The result of the job, in the shape of `batchery.Generation`."""
        took_s = time.perf_counter() - self._joined_s
        first_s = took_s if self._first_token_s is None else self._first_token_s - self._joined_s
        tokens_out = sum(len(text.tokens) for text in self.texts)
        results = [text.result() for text in self.texts]
        return {
            **(results[0] if len(results) == 1 else {"choices": results}),
            "tokens_in": len(self.prompt.tokens),
            "tokens_out": tokens_out,
            "timings": {
                "first_token_ms": round(first_s * 1000, 3),
                "total_ms": round(took_s * 1000, 3),
                "tokens_per_s": round(self._came / took_s, 3),
            },
        }
