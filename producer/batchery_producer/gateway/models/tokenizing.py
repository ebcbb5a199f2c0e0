"""Texts to tokens and back: no device is needed for that, so it never leaves the gateway."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

from batchery_producer.gateway.json_lists import json_list
from batchery_producer.gateway.models.files import ModelFiles
from batchery_producer.gateway.models.served_models import ServedModel
from batchery_producer.gateway.problems import Kind, Problem

#: Tokens that are written at a time: as few as are read in a moment, and as many as make it fast.
TOKENS_AT_A_TIME = 500


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    """The tokenizer of a model, as its `tokenizer.json` says, without limits.

    Attributes:
        library: That of the library `tokenizers`.
        prompts: Texts to put in front, by name.
        default_prompt: Name of the prompt for requests that name none.
        frame: Special tokens in front of a text, and behind it.
    """

    library: Tokenizer
    prompts: Mapping[str, str]
    default_prompt: str | None
    frame: tuple[list[int], list[int]]

    def prompt(self, name: str | None) -> str:
        """The text that goes in front.

        Raises:
            Problem: There is no such prompt.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            there = ", ".join(sorted(self.prompts)) or "none"
            raise Problem(
                Kind.INVALID,
                f"prompt_name {name!r:.80}: no such prompt; there are: {there}",
                param="prompt_name",
            )
        return self.prompts[name]

    def tokens(self, texts: Sequence[str], *, special: bool) -> bytes:
        """The tokens of each text, as JSON, and where they stand in it, in bytes.

        Args:
            texts: Texts, prompts included.
            special: Whether special tokens are added.
        """
        encodings = self.library.encode_batch(texts, add_special_tokens=special)
        return b"[%b]" % b",".join(
            json_list(_described(text, encoding), at_a_time=TOKENS_AT_A_TIME)
            for text, encoding in zip(texts, encodings, strict=True)
        )

    def without_frame(self, ids: list[int]) -> list[int]:
        """Token ids without the special tokens that the tokenizer puts around a text."""
        before, after = self.frame
        end = len(ids) - len(after)
        if len(before) <= end and ids[: len(before)] == before and ids[end:] == after:
            return ids[len(before) : end]
        return ids

    def texts(self, ids: Sequence[Sequence[int]], *, skip_special: bool) -> bytes:
        """The texts of token ids, as JSON; ids of no token are left out."""
        return json_list(
            self.library.decode_batch([*map(list, ids)], skip_special_tokens=skip_special)
        )


def load_tokenizer(model: ServedModel) -> ModelTokenizer:
    """Loads the tokenizer of a model.

    Raises:
        Problem: It has none that the library reads, or its files are not here.
    """
    files = ModelFiles(model)
    path = files.path("tokenizer.json")
    if path is None:
        raise Problem(
            Kind.UNSUPPORTED,
            f"model {model.name!r}: has no tokenizer.json, so its texts are tokenized in workers"
            " alone; save its fast tokenizer with save_pretrained",
        )
    try:
        library = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower.
        raise Problem(
            Kind.UNSUPPORTED, f"model {model.name!r}: its tokenizer.json cannot be read: {error}"
        ) from error
    library.no_truncation()
    library.no_padding()
    general = files.json("config_sentence_transformers.json")
    settings = model.settings
    return ModelTokenizer(
        library,
        {**(general.get("prompts") or {}), **settings.prompts},
        settings.default_prompt or general.get("default_prompt_name"),
        _frame(library),
    )


def _frame(library: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens in front of a text, and behind it."""
    whole = library.encode("a")
    inside = [place for place, is_special in enumerate(whole.special_tokens_mask) if not is_special]
    if not inside:
        return [], []
    return whole.ids[: inside[0]], whole.ids[inside[-1] + 1 :]


def _described(text: str, encoding: Encoding) -> Iterator[dict[str, Any]]:
    """The tokens of a text, one by one.

    All of them at once would take the garbage collector long, during which no thread runs.
    """
    places = bytes_of_chars(text).tolist()
    each = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True)
    for index, (token, name, is_special) in enumerate(each):
        chars = None if is_special else encoding.token_to_chars(index)
        start, end = chars or (0, 0)
        yield {
            "id": token,
            "text": text[start:end] if chars else name,
            "special": not chars,
            "start": places[start] if chars else None,
            "stop": places[end] if chars else None,
        }


def bytes_of_chars(text: str) -> NDArray[np.int64]:
    """Where each character begins in the text's UTF-8, and where the last one ends."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + sum((points > limit).astype(np.int64) for limit in (0x7F, 0x7FF, 0xFFFF))
    return np.concatenate(([0], np.cumsum(widths))).astype(np.int64)
