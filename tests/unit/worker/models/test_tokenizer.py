"""Texts in, tokens out: the fast way gives what the tokenizer gives, or is not taken."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from batchery.outcomes import Failed
from batchery_worker.models.tokenizer import Cut, TextTokenizer, Truncated
from support.tiny_models import Build, Load, make_tokenizer

TEXTS = ["the cat", "rain", "a dog barked at nine cats in the old garden", "ships carry tea"]

FITS = {"vocabulary": 1000, "max_length": 8, "truncate": True}


def made(tokenizer: Any, **options: Any) -> TextTokenizer:
    return TextTokenizer(tokenizer, ["input_ids", "token_type_ids"], **{**FITS, **options})


def usual(tokenizer: Any, texts: list[str], **options: Any) -> list[Any]:
    columns = tokenizer(texts, truncation=True, max_length=8, **options)
    return [
        [columns[name][row] for name in ("input_ids", "token_type_ids") if name in columns]
        for row in range(len(texts))
    ]


def test_limits_that_others_leave_in_the_tokenizer_do_no_harm() -> None:
    tokenizer = make_tokenizer()
    texts = made(tokenizer)
    before = texts(TEXTS)
    tokenizer(TEXTS, truncation=True, max_length=3, padding="max_length")
    for one, other in zip(before, texts(TEXTS), strict=True):
        np.testing.assert_array_equal(one, other)


class Particular(transformers.PreTrainedTokenizerFast):
    """Does something of its own around the library."""

    def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
        return super().__call__([each.upper() for each in text], *args, **options)


class Slow:
    """Knows no library."""

    def __init__(self) -> None:
        self._inner = make_tokenizer()

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self._inner(texts, **options)


def test_a_tokenizer_that_does_more_is_called_itself() -> None:
    plain = make_tokenizer()
    particular: Any = Particular(tokenizer_object=plain.backend_tokenizer, unk_token="[UNK]")  # type: ignore[no-untyped-call]
    for tokenizer in (particular, Slow()):
        texts = made(tokenizer)
        prepared = texts(TEXTS)
        assert [each.tolist() for each in prepared] == usual(tokenizer, TEXTS)  # type: ignore[union-attr]


@pytest.mark.parametrize("tokenizer", [make_tokenizer(), Slow()])
def test_a_text_that_lost_its_end_says_so_and_one_that_just_fits_does_not(tokenizer: Any) -> None:
    texts = made(tokenizer, max_length=4)
    short, fits, cut = texts(["rain", "the cat", "the cat sat on the mat"])
    assert [len(each[0]) for each in (short, fits, cut)] == [3, 4, 4]  # type: ignore[index]
    assert [isinstance(each, Truncated) for each in (short, fits, cut)] == [False, False, True]


def test_a_token_beyond_the_vocabulary_fails_alone(build: Build, embedder: Load) -> None:
    texts = made(make_tokenizer(), vocabulary=30)
    known, unknown = texts(["cat", "sea ships garden"])
    assert not isinstance(known, Failed)
    assert isinstance(unknown, Failed)
    assert "is unknown to the model" in str(unknown.error)


def test_a_tokenizer_may_drop_all_of_a_text() -> None:
    (nothing,) = made(make_tokenizer(causal=True))([" "])
    assert isinstance(nothing, Failed)
    assert "has no tokens" in str(nothing.error)


def test_two_threads_do_not_change_the_limits_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = made(make_tokenizer())
    sides = ("left", "right")
    expected = {side: texts(TEXTS, Cut(True, side)) for side in sides}
    encode = TextTokenizer._encode
    others: list[Future[Any]] = []

    with ThreadPoolExecutor(1) as other:

        def be_interrupted(self: TextTokenizer, library: Any, *arguments: Any) -> Any:
            def meet(batch: Any) -> Any:
                if not others:
                    others.append(other.submit(texts, TEXTS, Cut(True, "right")))
                    wait(others, 0.1)  # It ends only if nothing keeps it from this tokenizer.
                return library.encode_batch_fast(batch)

            watched = SimpleNamespace(
                no_padding=library.no_padding,
                enable_truncation=library.enable_truncation,
                encode_batch_fast=meet,
            )
            return encode(self, watched, *arguments)

        monkeypatch.setattr(TextTokenizer, "_encode", be_interrupted)
        found = {"left": texts(TEXTS, Cut(True, "left")), "right": others[0].result()}
    for side in sides:
        for one, other_one in zip(found[side], expected[side], strict=True):
            np.testing.assert_array_equal(one, other_one)
