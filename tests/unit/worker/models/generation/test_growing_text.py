"""Pieces of a growing text: whole characters, nothing of a stop string, nothing twice."""

import random
from collections.abc import Callable, Sequence

import pytest
from tokenizers import Tokenizer, decoders, models

from batchery_worker.models.generation.prompts import make_decoder
from batchery_worker.models.generation.texts import GrowingText
from support.tiny_models import CORPUS
from support.tiny_writers import FOREIGN, make_byte_tokenizer

TOKENIZER = make_byte_tokenizer()
DECODE = make_decoder(TOKENIZER)


def grow(text: str, stops: tuple[str, ...] = ()) -> tuple[GrowingText, list[str]]:
    growing, pieces = GrowingText(DECODE, stops), []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(growing.add(token))
        if growing.has_stopped:
            break
    pieces.append(growing.finish())
    return growing, pieces


@pytest.mark.parametrize("text", [FOREIGN, *CORPUS, "🙂" * 20, "[SEP] a [SEP] [UNK]é"])
def test_pieces_are_whole_characters_and_make_the_text(text: str) -> None:
    growing, pieces = grow(text)
    assert "".join(pieces) == growing.text == DECODE(TOKENIZER(text)["input_ids"])
    assert not any("\ufffd" in piece for piece in pieces)


def make_spaced_tokenizer() -> Tokenizer:
    """As Llama 2 has it: a first space is none, and characters that it does not know are bytes."""
    names = ["</s>", "\u2581", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, "</s>"))
    tokenizer.add_special_tokens(["</s>"])
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer


SPACED = make_spaced_tokenizer()
EMOJI = [SPACED.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]


@pytest.mark.parametrize("run", [1, 8, 11, 12, 13, 5000])
@pytest.mark.parametrize(
    ("decode", "special", "tokens"),
    [
        (DECODE, TOKENIZER.eos_token_id, TOKENIZER("🙂 a🙂é b")["input_ids"]),
        (SPACED.decode, 0, [1, 1, 2, *EMOJI, 2, *EMOJI, *EMOJI, 1, 3, 1]),
    ],
)
def test_special_tokens_within_a_text_cost_and_change_nothing(
    decode: Callable[[Sequence[int]], str], special: int, tokens: list[int], run: int
) -> None:
    for at in range(len(tokens) + 1):
        longest = 0

        def watch(window: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(window))
            return decode(window)

        growing = GrowingText(watch)
        pieces = [growing.add(token) for token in (*tokens[:at], *[special] * run, *tokens[at:])]
        assert longest < 40
        # A character that is interrupted for long is none.
        if not decode(tokens[:at]).endswith("\ufffd") or run < 5:
            assert "".join([*pieces, growing.finish()]) == growing.text == decode(tokens)


def test_random_stop_strings_cut_where_the_first_of_them_begins() -> None:
    choose = random.Random(1)
    for _ in range(500):
        text = "".join(choose.choices("ab é🙂", k=30))
        stops = tuple("".join(choose.choices("ab é🙂", k=choose.randint(1, 4))) for _ in range(3))
        growing, pieces = grow(text, stops)
        ends = [at for stop in stops if (at := text.find(stop)) >= 0]
        assert growing.has_stopped == bool(ends)
        # Several may be complete with the same token; the one that was complete first wins.
        assert "".join(pieces) == growing.text
        assert text.startswith(growing.text)
        if not ends:
            assert growing.text == text
        assert not any(stop in growing.text for stop in stops)


def test_bytes_that_are_no_character_do_not_wait_for_ever() -> None:
    lone = TOKENIZER("é")["input_ids"][0]
    growing = GrowingText(DECODE)
    assert any(growing.add(lone) for _ in range(20))
