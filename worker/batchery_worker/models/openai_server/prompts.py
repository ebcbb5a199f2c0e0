"""Items and keywords as a server takes them."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from batchery.errors import InvalidItem
from batchery.settings import ModelSettings
from batchery_worker.models.inputs import GenerationKeywords, Keywords, check_text, read_keywords
from batchery_worker.models.openai_server.exchange import ServerPrompt


class ServerKeywords(GenerationKeywords):
    """Keywords of a job; a server refuses those that it does not know.

    Attributes:
        min_p: As vLLM has it, which OpenAI has not.
        frequency_penalty: As OpenAI has it, and so on.
        presence_penalty: The same.
        logit_bias: The same.
        response_format: The form of the answer, such as a JSON schema.
        tools: Functions that the model may call.
        tool_choice: Which of them it must call.
        extra_body: More fields of the request, which outrank all others; None leaves one out.
    """

    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    extra_body: dict[str, Any] | None = None


class ServerItem(Keywords):
    """An item that is a dictionary.

    Attributes:
        prompt: A text, or its tokens.
        messages: A chat; either this or `prompt`.
        tools: As the keyword.
        tool_choice: As the keyword.
        extra_body: As the keyword.
        options: Keywords of this item alone, which outrank those of the job.
    """

    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    tool_choice: Any = None
    extra_body: Any = None
    options: dict[str, Any] | None = None


def read_prompt(
    item: Any,
    keywords: Mapping[str, Any],
    settings: ModelSettings,
    kind: type[ServerKeywords] = ServerKeywords,
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ServerPrompt:
    """The request for an item.

    Args:
        item: A text, its tokens, a list of messages, or a dictionary as `ServerItem`.
        keywords: Keywords of its job.
        settings: The model's.
        kind: Which keywords there are.
        defaults: Fields of the request unless the job says something else.
    """
    read = read_item(item)
    own = read.model_dump(include={"tools", "tool_choice", "extra_body"}, exclude_none=True)
    options = read_keywords(kind, {**keywords, **own, **(read.options or {})})
    asked_for = options.model_dump(exclude={"extra_body", "max_new_tokens"}, exclude_unset=True)
    body = {**defaults, **asked_for}
    body["max_tokens"] = options.max_new_tokens or settings.max_new_tokens
    body["temperature"] = options.temperature
    body["stream_options"] = {"include_usage": True}
    if read.messages and options.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": options.logprobs}
    body |= options.extra_body or {}
    body |= {"prompt": read.prompt, "messages": read.messages}
    body |= {"model": settings.model, "stream": True}
    body = {name: value for name, value in body.items() if value is not None}
    text = json.dumps(body, ensure_ascii=False)
    check_text("item", text, settings.max_chars)
    asked = [body.get(name) for name in ("max_tokens", "max_completion_tokens")]
    asked += [options.max_new_tokens or settings.max_new_tokens]
    return ServerPrompt(
        path="chat/completions" if read.messages else "completions",
        content=text.encode(),
        choices=options.n,
        max_tokens=max(each for each in asked if isinstance(each, int)) * options.n,
    )


def read_item(item: Any) -> ServerItem:
    """The parts of an item.

    Raises:
        InvalidItem: It is none; names what is wrong.
    """
    is_chat = isinstance(item, list) and item and isinstance(item[0], dict)
    fields = item if isinstance(item, dict) else {"messages" if is_chat else "prompt": item}
    try:
        read = ServerItem.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidItem(f"item.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if bool(read.prompt) == bool(read.messages):
        raise InvalidItem("item: must be a prompt, or the messages of a chat, and not empty")
    return read
