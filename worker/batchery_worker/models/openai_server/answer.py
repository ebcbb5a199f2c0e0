"""What a server sends for one item, put together: pieces as they come, and the result."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from batchery.errors import ServerFailed

#: Fields of a message that come bit by bit; all others come whole.
GROWING = ("arguments", "reasoning", "reasoning_content", "refusal")


class ChoiceEvent(BaseModel):
    """What an event adds to one of the answers: to a message in a chat, else to a text."""

    index: int = Field(0, ge=0)
    delta: dict[str, Any] | None = None
    text: str | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class TokenCounts(BaseModel):
    """Tokens as the server counts them."""

    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(0, ge=0)


class StreamEvent(BaseModel):
    """One event of a stream."""

    choices: list[ChoiceEvent] = []
    usage: TokenCounts | None = None
    error: Any = None


#: A second stream does not go on from what readers have of the first.
DISAGREES = (
    "its stream was cut, and another one does not go on from what readers have; run the job again"
)


class ServerChoice:
    """One of the answers to an item, so far.

    Attributes:
        text: Its text.
        sent: The text that readers have of it, perhaps from an earlier stream.
        finish_reason: Why it has ended; None while it has not.
    """

    def __init__(self, sent: str) -> None:
        self.sent = sent
        self.finish_reason: str | None = None
        self.text = ""
        self._message: dict[str, Any] = {}
        self._calls: dict[Any, dict[str, Any]] = {}
        self._logprobs: list[dict[str, Any]] = []

    def add(self, event: ChoiceEvent) -> dict[str, Any]:
        """Adds an event; returns the piece for readers, empty if it has nothing new for them.

        Raises:
            ServerFailed: The text is not what readers have.
        """
        parts = event.delta or {}
        text = (event.text or "") + (parts.get("content") or "")
        fresh = text[max(0, len(self.sent) - len(self.text)) :]
        self.text += text
        if not self.text.startswith(self.sent) and not self.sent.startswith(self.text):
            raise ServerFailed(DISAGREES)
        self.sent = max(self.sent, self.text, key=len)
        delta = {
            name: value
            for name, value in parts.items()
            if value and name not in ("role", "content")
        }
        for call in delta.get("tool_calls", ()):
            # Some servers send whole calls without an index, which OpenAI's clients need.
            if call.get("index") is None:
                call["index"] = len(self._calls)
            merge(self._calls.setdefault(call["index"], {}), call)
        merge(self._message, delta)
        self.finish_reason = event.finish_reason or self.finish_reason
        logprobs = list(read_logprobs(event.logprobs or {}))
        self._logprobs += logprobs
        new = {"text": fresh, "delta": delta, "logprobs": logprobs if fresh == text else None}
        piece = {name: value for name, value in new.items() if value}
        return {"text": "", **piece} if piece else piece

    def result(self) -> dict[str, Any]:
        """The whole answer. Raises ServerFailed: it ends before what readers have."""
        if self.text != self.sent:
            raise ServerFailed(DISAGREES)
        result: dict[str, Any] = {"text": self.text, "finish_reason": self.finish_reason}
        for call in self._calls.values():
            call.pop("index", None)
        if self._calls:
            self._message["tool_calls"] = list(self._calls.values())
        if self._message:
            content = self.text or None
            result["message"] = {"role": "assistant", "content": content, **self._message}
        return result | ({"logprobs": self._logprobs} if self._logprobs else {})


class ServerAnswer:
    """The answers to one item, so far.

    Attributes:
        usage: Tokens; None until the server reports them.
    """

    def __init__(self, choices: int, max_chars: int, sent: Mapping[int, str]) -> None:
        """Starts with nothing.

        Args:
            choices: Number of answers that were asked for.
            max_chars: Maximum length of all events; more are those of a server that never ends.
            sent: The texts that readers have of each answer, from an earlier stream.
        """
        self._choices = [ServerChoice(sent.get(index, "")) for index in range(choices)]
        self._left_chars = self._max_chars = max_chars
        self.usage: TokenCounts | None = None
        self._has_deltas = False

    @property
    def is_complete(self) -> bool:
        """Whether the server has said of all answers why they end."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def chars(self) -> int:
        """Length of all texts so far."""
        return sum(len(choice.text) for choice in self._choices)

    def read_sent(self) -> dict[int, str]:
        """The texts that readers have by now. Raises ServerFailed: they have more than texts."""
        if self._has_deltas:
            raise ServerFailed(DISAGREES)
        return {index: choice.sent for index, choice in enumerate(self._choices)}

    def add(self, data: str) -> tuple[list[dict[str, Any]], Any]:
        """Adds an event; returns the pieces for readers, and an error that the server reports.

        Raises:
            ServerFailed: It is no event of a completion, there is no end of them, or the text is
                not what readers have.
        """
        self._left_chars -= len(data)
        if self._left_chars < 0:
            raise ServerFailed(
                f"it goes on after {self._max_chars} characters; see whether it heeds max_tokens"
            )
        try:
            event = StreamEvent.model_validate_json(data)
            added = [(self._choices[each.index].add(each), each.index) for each in event.choices]
        except (ValidationError, AttributeError, IndexError, KeyError, TypeError):
            raise ServerFailed(
                f"it sent an event that is none of a completion: {data:.200}"
            ) from None
        self.usage = event.usage or self.usage
        is_one = len(self._choices) == 1
        pieces = [piece if is_one else {**piece, "choice": at} for piece, at in added if piece]
        if not is_one:
            pieces += [
                {"text": "", "choice": each.index, "finish_reason": each.finish_reason}
                for each in event.choices
                if each.finish_reason
            ]
        self._has_deltas |= any("delta" in piece for piece in pieces)
        return pieces, event.error

    def result(self, first_s: float, total_s: float) -> dict[str, Any]:
        """The result of the job, as the kind `generation` has it.

        Raises:
            ServerFailed: One of the texts ends before what readers have.
        """
        results = [choice.result() for choice in self._choices]
        tokens_in = self.usage and self.usage.prompt_tokens
        tokens_out = self.usage and self.usage.completion_tokens
        per_s = tokens_out and round(tokens_out / max(total_s - first_s, 1e-3), 1)
        timings = {"first_token_ms": first_s * 1e3, "total_ms": total_s * 1e3}
        return {
            **({"choices": results} if results[1:] else results[0]),
            "tokens_in": tokens_in,
            "tokens_out": tokens_out,
            "timings": {**{k: round(v, 1) for k, v in timings.items()}, "tokens_per_s": per_s},
        }


def merge(known: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Adds what an event has to what earlier ones had."""
    for key, value in delta.items():
        if isinstance(value, dict):
            merge(known.setdefault(key, {}), value)
        elif value is not None:
            known[key] = known.get(key, "") + value if key in GROWING else value


def read_logprobs(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Log probabilities as the kind `generation` has them, of a chat or of a completion."""
    for each in found.get("content") or ():
        others = each.get("top_logprobs") or []
        top = [[other["token"], None, other["logprob"]] for other in others]
        read = {"token": each["token"], "id": None, "logprob": each["logprob"], "top": top}
        known = [one.get("bytes") for one in (each, *others)]
        yield {**read, "bytes": known} if any(known) else read
    tokens = found.get("tokens") or ()
    tops = found.get("top_logprobs") or [{}] * len(tokens)
    for token, logprob, others in zip(
        tokens, found.get("token_logprobs") or (), tops, strict=False
    ):
        top = [[other, None, number] for other, number in (others or {}).items()]
        yield {"token": token, "id": None, "logprob": logprob, "top": top}
