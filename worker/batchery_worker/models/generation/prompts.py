"""From items to tokens: prompts, and chats by the model's own template."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from pydantic_core import from_json
from transformers.convert_slow_tokenizer import bytes_to_unicode

from batchery.errors import InvalidItem
from batchery_worker.models.inputs import GenerationItem, check_text, check_token_ids
from batchery_worker.models.source import reason

#: Roles that chats have everywhere. Others are taken if the template names them.
ROLES = ("system", "developer", "user", "assistant", "tool")


class Prompts:
    """Reads the items of one model."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_chars: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_chars = max_chars

    def read(self, item: GenerationItem) -> list[int]:
        """Returns the tokens of an item. Raises InvalidItem: it has none, or wrong ones."""
        if item.messages:
            return self._not_empty(self._chat(item.messages, item.tools, item.tool_choice))
        if isinstance(item.prompt, list):
            return check_token_ids(item.prompt, self._vocabulary, self._max_chars)
        text = check_text("prompt", item.prompt, self._max_chars)
        return self._not_empty(self._tokenizer(text)["input_ids"])

    def _not_empty(self, tokens: list[int]) -> list[int]:
        if not tokens:
            raise InvalidItem("prompt: has no tokens")
        return tokens

    def _chat(self, messages: Sequence[Any], tools: Any, tool_choice: Any) -> list[int]:
        template = self._tokenizer.chat_template
        if not template:
            raise InvalidItem("messages: the model has no chat template; send a prompt")
        checked = [self._message(at, each, str(template)) for at, each in enumerate(messages)]
        try:
            text = self._tokenizer.apply_chat_template(
                checked,
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                # Few templates read it.
                **({} if tool_choice is None else {"tool_choice": tool_choice}),
            )
        except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidItem(
                f"messages: the model's chat template refuses them: {reason(error)}"
            ) from None
        check_text("messages", text, self._max_chars)
        # The template has written the special tokens.
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _message(self, at: int, message: dict[str, Any], template: str) -> dict[str, Any]:
        role = message.get("role")
        if role not in ROLES and not (isinstance(role, str) and role and role in template):
            raise InvalidItem(f"messages[{at}].role = {role!r:.80}: there are {', '.join(ROLES)}")
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(_text(at, part) for part in content)
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidItem(
                f"messages[{at}].content: must be a text, not {type(content).__name__}"
            )
        found = {**message, "content": content or ""}
        if isinstance(calls := message.get("tool_calls"), list):
            found["tool_calls"] = [_open_arguments(call) for call in calls]
        return found


def _text(at: int, part: Any) -> str:
    """The text of a part of a message."""
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise InvalidItem(f"messages[{at}].content: the model reads only parts with a text")
    return text


def _open_arguments(call: Any) -> Any:
    """A call of a tool, with its arguments as an object: so templates have them, OpenAI as JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = from_json(function["arguments"] or "{}")
    except ValueError:
        return call
    is_object = isinstance(arguments, dict)
    return {**call, "function": {**function, "arguments": arguments}} if is_object else call


def make_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function from tokens to text, without special tokens."""
    # The Rust tokenizer alone takes microseconds; transformers checks for a while what it is given.
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:
        return lambda tokens: str(fast.decode(tokens))
    return lambda tokens: str(
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def make_speller(tokenizer: Any) -> Callable[[int, bool], str]:
    """A function that says what a token adds to a text, and whether it is the first one there.

    Many vocabularies write a word's space before it, and decode none at the beginning of a text.
    """
    before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    known = len(tokenizer.decode(before))

    def spell(token: int, is_first: bool) -> str:
        if is_first:
            return str(tokenizer.decode([token]))
        return str(tokenizer.decode([*before, token]))[known:]

    return spell


#: The bytes that characters in the vocabularies of most models stand for.
BYTES: dict[str, int] = {
    character: byte
    for byte, character in bytes_to_unicode().items()  # type: ignore[no-untyped-call]
}


def read_bytes(tokenizer: Any, token: int, text: str) -> list[int] | None:
    """The bytes of a token, whose text may be a part of a character; None if they are unknown."""
    name = tokenizer.convert_ids_to_tokens(token) or ""
    found = re.fullmatch("<0x([0-9A-F]{2})>", name)
    values = [int(found[1], 16)] if found else [BYTES.get(each, -1) for each in name]
    if -1 in values or bytes(values).decode(errors="replace") != text:
        return None
    return values


def ending_tokens(defaults: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens with which a text ends."""
    known = defaults.eos_token_id
    if known is None:
        known = tokenizer.eos_token_id
    several: Sequence[int] = known if isinstance(known, (list, tuple)) else [known]
    return frozenset(each for each in several if each is not None)
