"""OpenAI's requests for texts: their bodies become items, and results become answers.

The gateway's routes and the lines of batch files have these bodies in common.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from batchery_producer.request_fields import RequestBody, Unserved, expected

CHAT_URL = "/v1/chat/completions"
TEXT_URL = "/v1/completions"

#: OpenAI's code of a prompt that is too long.
TOO_LONG_CODE = "context_length_exceeded"

# Requests


#: Temperature of requests that name none, as with OpenAI; a job without one takes the likeliest
#: token.
TEMPERATURE = 1.0

#: Fields that are options of an item under the same names, and the value of each that says
#: nothing: an engine that has no such option is not asked for it then.
OPTIONS: Mapping[str, Any] = {
    "top_p": 1,
    "top_k": -1,
    "min_p": 0,
    "seed": None,
    "stop": [],
    "n": 1,
    "repetition_penalty": 1,
    "ignore_eos": False,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}


#: Maximum characters of a text before which answers end: each token that is written is compared.
MAX_STOP_CHARS = 1_000

#: Maximum messages of a chat, which a template writes one by one; and tokens with a bias.
MAX_MESSAGES, MAX_BIASES = 2_000, 1_000

StopText = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class StreamOptions(RequestBody):
    """What a stream has besides its text."""

    include_usage: bool | None = None


class ForwardedFields(RequestBody):
    """Fields that a server behind a model gets as they came; all other engines ignore them."""

    chat_template_kwargs: Any = None
    metadata: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: str | None = None
    verbosity: Any = None


class GenerationRequest(ForwardedFields):
    """Fields of both routes; a null is as good as none."""

    model: Annotated[str | None, Field(description="The first generation model if missing.")] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, description="1 if missing.")] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    n: Annotated[int | None, Field(ge=1, le=128, description="Texts for each prompt.")] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Annotated[
        StopText | Annotated[list[StopText], Field(max_length=16)] | None,
        expected(f"a text, or a list of up to 16 texts, of up to {MAX_STOP_CHARS} characters"),
        Field(description="Texts before which the answer ends."),
    ] = None
    max_tokens: Annotated[
        int | None, Field(ge=1, description="New tokens; the model's `max_new_tokens` if missing.")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=MAX_BIASES)] = None
    response_format: dict[str, Any] | None = None
    top_k: Annotated[int | None, Field(ge=-1, description="vLLM's; -1 and 0 are no limit.")] = None
    min_p: Annotated[float | None, Field(ge=0, le=1, description="vLLM's.")] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, description="vLLM's.")] = None
    ignore_eos: Annotated[bool | None, Field(description="vLLM's.")] = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the number of its tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def max_new_tokens(self) -> int | None:
        """How many tokens an answer has at most."""
        return self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """How many likeliest tokens are told in each place; None for no logarithms at all."""
        raise NotImplementedError

    def contents(self) -> list[dict[str, Any]]:
        """What each item is about."""
        raise NotImplementedError

    def items(self) -> list[dict[str, Any]]:
        """An item for each prompt, with its options; what was left out is left to the model."""
        options: dict[str, Any] = {
            "temperature": TEMPERATURE if self.temperature is None else self.temperature,
            "max_new_tokens": self.max_new_tokens,
            "logprobs": self.wanted_logprobs,
        }
        for name, neutral in OPTIONS.items():
            value = getattr(self, name)
            options[name] = None if value == neutral else value
        given = {name: value for name, value in options.items() if value is not None}
        rest: dict[str, Any] = {"options": given}
        if extra := self.extra_body():
            rest["extra_body"] = extra
        return [{**content, **rest} for content in self.contents()]

    def extra_body(self) -> dict[str, Any]:
        """What only a server behind a model gets."""
        return self.model_dump(include=set(ForwardedFields.model_fields), exclude_none=True)


class ChatMessage(RequestBody):
    """A message; further fields, such as `tool_calls`, are the template's."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, examples=["user"])]
    content: Annotated[
        str | list[dict[str, Any]] | None,
        expected("a text, or a list of parts such as {'type': 'text', 'text': ...}"),
        Field(examples=["the cat"]),
    ] = None


class ChatRequest(GenerationRequest):
    """A conversation that wants an answer."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[
        int | None, Field(ge=1, description="The newer name of `max_tokens`.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, expected("'none', 'auto', 'required', or a tool")
    ] = None
    audio: Unserved = None
    functions: Unserved = None
    function_call: Unserved = None
    web_search_options: Unserved = None

    @property
    def max_new_tokens(self) -> int | None:
        """As the newer field says, or the older one."""
        return self.max_completion_tokens or self.max_tokens

    def extra_body(self) -> dict[str, Any]:
        """As `GenerationRequest.extra_body`."""
        found = super().extra_body()
        if self.max_completion_tokens:
            # Models that reason refuse `max_tokens`.
            found["max_tokens"] = self.max_tokens
            found["max_completion_tokens"] = self.max_completion_tokens
        if self.tools and self.tool_choice == "none":
            found |= {"tools": self.tools, "tool_choice": "none"}
        return found

    @property
    def wanted_logprobs(self) -> int | None:
        """As `GenerationRequest.wanted_logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def contents(self) -> list[dict[str, Any]]:
        """The conversation, and the tools that the model may call."""
        found: dict[str, Any] = {
            "messages": [each.model_dump(exclude_none=True) for each in self.messages]
        }
        if self.tools and self.tool_choice != "none":
            found["tools"] = self.tools
            if self.tool_choice not in (None, "auto"):
                found["tool_choice"] = self.tool_choice
        return [found]


class CompletionRequest(GenerationRequest):
    """A text that is to go on, or several."""

    prompt: Annotated[
        str
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[str | list[int]], Field(min_length=1)],
        expected("a text, a list of token ids, or a list of either"),
        Field(examples=["the cat", ["the cat", "a dog"]]),
    ]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    best_of: Annotated[Literal[1] | None, Field(description="More are not served.")] = None
    echo: Unserved = None
    suffix: Unserved = None

    @property
    def wanted_logprobs(self) -> int | None:
        """As `GenerationRequest.wanted_logprobs`."""
        return self.logprobs

    def contents(self) -> list[dict[str, Any]]:
        """The prompts."""
        given = self.prompt
        is_one = isinstance(given, str) or isinstance(given[0], int)
        return [{"prompt": prompt} for prompt in ([given] if is_one else given)]


def count_chars(items: Sequence[Any]) -> int:
    """Characters of all items of a request as they are sent, each with what all of them share.

    Of a text those are its characters or token ids, of a chat and of long options those of JSON.
    """
    # What they share is the same in each, so it is looked at once.
    return sum(map(_count_own_chars, items)) + len(items) * _count_shared_chars(items[0])


def _count_own_chars(item: Any) -> int:
    if not isinstance(item, Mapping):
        return len(item)
    if "prompt" in item:
        return len(item["prompt"])
    return _count_json_chars([item["messages"], item.get("tools")])


def _count_shared_chars(item: Any) -> int:
    if not isinstance(item, Mapping):
        return 0
    long = [each for each in item["options"].values() if isinstance(each, str | list | dict)]
    return sum(map(_count_json_chars, filter(None, [*long, item.get("extra_body")])))


def _count_json_chars(value: Any) -> int:
    return len(json.dumps(value, ensure_ascii=False))


# Answers


class CompletionUsage(TypedDict):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AssistantMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: NotRequired[list[dict[str, Any]]]


FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason


class ChatCompletion(TypedDict):
    """All answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextChoice(TypedDict):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class TextCompletion(TypedDict):
    """How all prompts go on."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: CompletionUsage


def list_choices(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The texts of a result: several where the request had an `n`."""
    return result.get("choices") or [result]


def count_usage(results: Iterable[Mapping[str, Any]]) -> CompletionUsage:
    """The tokens of some results together."""
    # A server behind a model may not count.
    pairs = [(each["tokens_in"] or 0, each["tokens_out"] or 0) for each in results]
    read, written = (sum(counts) for counts in zip(*pairs, strict=True))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _likely(token: str, logprob: float, known: Any) -> dict[str, Any]:
    if known is None and "\ufffd" not in token:  # Not a part of a character.
        known = list(token.encode(errors="replace"))
    return {"token": token, "logprob": logprob, "bytes": known}


def _list_likely(found: Mapping[str, Any]) -> dict[str, Any]:
    """A token, and the likeliest ones in its place."""
    own, *others = found.get("bytes") or [None] * (1 + len(found["top"]))
    likeliest = zip(found["top"], others, strict=True)
    return {
        **_likely(found["token"], found["logprob"], own),
        "top_logprobs": [_likely(token, value, known) for (token, _, value), known in likeliest],
    }


class ChatForm:
    """How `/v1/chat/completions` puts texts, whole or piece by piece."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def whole(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """A choice of a whole answer."""
        message = {"content": choice["text"], **choice.get("message", {}), "role": "assistant"}
        reason = choice["finish_reason"]
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(index, choice),
            "finish_reason": reason,
        }

    def opening(self, index: int) -> list[dict[str, Any]]:
        """What comes before the first piece of a choice."""
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def piece(self, index: int, piece: Mapping[str, Any]) -> dict[str, Any]:
        """A piece of a choice."""
        delta = {"content": piece["text"]} if piece["text"] else {}
        found = self._delta(index, {**delta, **piece.get("delta", {})})
        return {**found, "logprobs": self.logprobs(index, piece)}

    def ending(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """What comes after the last piece of a choice."""
        return {**self._delta(index, {}), "finish_reason": choice["finish_reason"]}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def logprobs(self, _: int, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """How likely the tokens of a choice or piece were."""
        if found.get("logprobs") is None:
            return None
        return {"content": [_list_likely(each) for each in found["logprobs"]]}


class TextForm:
    """How `/v1/completions` puts texts, whole or piece by piece; one for each request."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def __init__(self) -> None:
        """Begins at the start of each text."""
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """A choice of a whole answer."""
        return {**self.piece(index, choice), "finish_reason": choice["finish_reason"]}

    def opening(self, _: int) -> list[dict[str, Any]]:
        """What comes before the first piece of a choice: nothing."""
        return []

    def piece(self, index: int, piece: Mapping[str, Any]) -> dict[str, Any]:
        """A piece of a choice."""
        logprobs = self.logprobs(index, piece)
        return {"index": index, "text": piece["text"], "logprobs": logprobs, "finish_reason": None}

    def ending(self, index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
        """What comes after the last piece of a choice."""
        return self.whole(index, {"text": "", "finish_reason": choice["finish_reason"]})

    def logprobs(self, index: int, found: Mapping[str, Any]) -> dict[str, Any] | None:
        """How likely the tokens of a choice or piece were."""
        tokens = found.get("logprobs")
        if tokens is None:
            return None
        start = self._offsets.get(index, 0)
        offsets = list(accumulate((len(each["token"]) for each in tokens), initial=start))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": [each["token"] for each in tokens],
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": [{token: value for token, _, value in each["top"]} for each in tokens],
            "text_offset": offsets,
        }


Form = ChatForm | TextForm

FORMS: Mapping[str, type[ChatForm] | type[TextForm]] = {CHAT_URL: ChatForm, TEXT_URL: TextForm}


def build_completion(
    url: str, id_: str, model: str, results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The body of a whole answer."""
    form = FORMS[url]()
    choices = [choice for result in results for choice in list_choices(result)]
    return {
        "id": form.id_prefix + id_,
        "object": form.whole_object,
        "created": int(time.time()),
        "model": model,
        "choices": [form.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": count_usage(results),
    }
