"""From texts to tokens, a whole batch at once, with little work per text. Needs no torch."""

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

from batchery.errors import InvalidItem
from batchery.outcomes import Failed

#: One tokenized text: a row per model input, token ids first, (I, L) int64.
Prepared = NDArray[np.int64]


class Truncated(np.ndarray[Any, np.dtype[np.int64]]):
    """The tokens of a text that was longer than the limit and lost its end, or its beginning."""


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Tokens instead of a text.

    Attributes:
        ids: Tokens of the model's own tokenizer, without special ones.
        before: A text whose tokens go in front.
    """

    ids: list[int]
    before: str = ""


#: What is tokenized: a text, a pair of texts, or tokens.
Input = str | tuple[str, str] | TokenIds


class Cut(NamedTuple):
    """What happens to texts of more than `max_length` tokens.

    Attributes:
        truncate: They are cut; otherwise they are refused.
        side: Where they lose tokens: `left` or `right`.
        max_length: The limit, if it is lower than that of the model.
    """

    truncate: bool
    side: str
    max_length: int | None = None

    def within(self, max_length: int | None) -> "Cut":
        """The same, with the lower one of both limits."""
        known = [each for each in (self.max_length, max_length) if each is not None]
        return self._replace(max_length=min(known, default=None))


#: How pairs are cut, as transformers calls it.
LONGEST = "longest_first"

#: Columns of a tokenized batch, in the order of the names: for each text a list of numbers.
Columns = list[list[list[int]]]

#: Says of a text, by its place in the batch, whether it lost its end.
IsCut = Callable[[int], bool]

#: Attributes of the tokenizers library, by transformers' name of the column.
ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}

#: Texts on which both ways of tokenizing are compared: other scripts, special tokens, white space;
#: besides, texts beyond the limit, and pairs of all of these.
PROBES = (
    "a",
    "The quick brown fox, 1984: don't!  Naïve Zürich\tжизнь 数字 🙂\n",
    "[CLS] <s> </s> [PAD] <|endoftext|> [MASK]",
    " ",
)


def set_limit(library: Tokenizer, max_length: int | None, side: str) -> None:
    """Has a tokenizer cut texts on a side, without padding.

    Args:
        library: The tokenizer.
        max_length: Maximum length in tokens; None leaves texts whole.
        side: Where they lose tokens: `left` or `right`.
    """
    library.no_padding()
    if max_length is None:
        library.no_truncation()
    else:
        library.enable_truncation(max_length, strategy=LONGEST, direction=side)


class LibraryTokenizer:
    """A tokenizer of the library alone, which is called as one of transformers."""

    def __init__(self, library: Tokenizer, side: str) -> None:
        """Takes over the tokenizer, whose limits it changes.

        Args:
            library: The tokenizer.
            side: Where long texts lose tokens: `left` or `right`.
        """
        self.backend_tokenizer = library
        self.truncation_side = side

    def __call__(
        self,
        texts: list[str],
        pairs: list[str] | None = None,
        *,
        truncation: Any = False,
        max_length: int | None = None,
        add_special_tokens: bool = True,
        **_: Any,
    ) -> dict[str, list[list[int]]]:
        """Tokenizes texts, or pairs of them, without padding; a column has a list per text."""
        library = self.backend_tokenizer
        set_limit(library, max_length if truncation else None, self.truncation_side)
        inputs: Any = texts if pairs is None else [*zip(texts, pairs, strict=True)]
        encodings = library.encode_batch(inputs, add_special_tokens=add_special_tokens)
        return {
            name: [getattr(each, attribute) for each in encodings]
            for name, attribute in ATTRIBUTES.items()
        }

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The text of a token."""
        return self.backend_tokenizer.id_to_token(token)


class TextTokenizer:
    """A model's tokenizer, within the limits of the model.

    Attributes:
        names: Model inputs that a tokenized text has, in the order of its rows.
        usual_cut: What happens to long texts, unless a call says otherwise.
    """

    def __init__(
        self,
        tokenizer: Any,
        inputs: Collection[str],
        *,
        vocabulary: int,
        max_length: int | None,
        truncate: bool,
    ) -> None:
        """Finds the fastest way that gives the same tokens.

        Args:
            tokenizer: The tokenizer of transformers.
            inputs: Inputs of the model, token ids first. Inputs that the tokenizer does not make
                are left out.
            vocabulary: Number of tokens that the model knows.
            max_length: Maximum length of a text in tokens; None if unlimited.
            truncate: Whether longer texts are usually cut; otherwise they are refused.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_length = max_length
        # Limits are set before texts are tokenized, and a device prepares on either of two threads.
        self._lock = threading.Lock()
        side = getattr(tokenizer, "truncation_side", "right")
        self.usual_cut = Cut(truncate, side, max_length=max_length)
        self.names = [name for name in inputs if name in self._call(["a"], self.usual_cut)]
        self._columns: Callable[[Any, Cut], tuple[Columns, IsCut]] = self._usual
        #: The tokenizer of the library, if that alone gives the same tokens.
        self.library: Tokenizer | None = None
        if self._is_fast():
            self._columns, self.library = self._fast, tokenizer.backend_tokenizer

    def __call__(self, inputs: Sequence[Input], cut: Cut | None = None) -> list[Prepared | Failed]:
        """Tokenizes texts, pairs of texts, and what is tokens already.

        Args:
            inputs: Of any kinds, mixed.
            cut: What happens to long texts; None for the usual.

        Returns:
            The tokens of each input, in order, not padded; `Truncated` where a text lost some.
            `Failed` with an `InvalidItem` for a text with no tokens, too many, or one that the
            model does not know.
        """
        cut = (cut or self.usual_cut).within(self._max_length)
        done: dict[int, Prepared | Failed] = {}
        for kind in {type(each) for each in inputs}:
            places = [place for place, each in enumerate(inputs) if type(each) is kind]
            same = [inputs[place] for place in places]
            with self._lock:
                tokenized = self._framed(same, cut) if kind is TokenIds else self._texts(same, cut)
            done |= zip(places, tokenized, strict=True)
        return [done[place] for place in range(len(inputs))]

    @contextmanager
    def lend(self, side: str) -> Iterator[None]:
        """In this block the tokenizer is for other code alone, and cuts texts on that side."""
        with self._lock:
            self._tokenizer.truncation_side = side
            yield

    def _texts(self, texts: Sequence[Any], cut: Cut) -> list[Prepared | Failed]:
        return self._prepared(*self._columns(texts, cut), cut)

    def _prepared(self, columns: Columns, is_cut: IsCut, cut: Cut) -> list[Prepared | Failed]:
        lengths = list(map(len, columns[0]))
        rows = np.empty((len(columns), sum(lengths)), dtype=np.int64)
        for row, column in zip(rows, columns, strict=True):
            row[:] = np.fromiter(chain.from_iterable(column), np.int64, rows.shape[1])
        tokenized = [rows[:, start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
        if cut.truncate:
            for place, length in enumerate(lengths):
                if length == cut.max_length and is_cut(place):
                    tokenized[place] = tokenized[place].view(Truncated)
        if self._all_fit(rows[0], lengths, cut):
            return list(tokenized)
        return [self._checked(each, cut) for each in tokenized]

    def _framed(self, inputs: Sequence[Any], cut: Cut) -> list[Prepared | Failed]:
        """Puts special tokens around token ids."""
        if self._numbers is None:
            unknown = "token ids: it is unknown where special tokens go; send a text"
            return [Failed(InvalidItem(unknown)) for _ in inputs]
        texts = [" ".join(map(str, self._ids(each.before) + each.ids)) for each in inputs]
        return self._prepared(*self._encode(self._numbers, texts, cut), cut)

    @cached_property
    def _numbers(self) -> Any:
        """A tokenizer whose words are the numbers of tokens, with the model's special tokens.

        None if the model's own is none of the library.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        words = {str(number): number for number in range(self._vocabulary)}
        numbers = Tokenizer(models.WordLevel(words, unk_token="0"))
        numbers.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if backend.post_processor is not None:
            numbers.post_processor = backend.post_processor
        return numbers

    def _ids(self, text: str) -> list[int]:
        if not text:
            return []
        found = self._tokenizer([text], add_special_tokens=False, verbose=False)
        ids: list[int] = found["input_ids"][0]
        return ids

    def _all_fit(self, ids: NDArray[np.int64], lengths: Sequence[int], cut: Cut) -> bool:
        longest = max(lengths) if cut.max_length is None else cut.max_length
        return 0 < min(lengths) <= max(lengths) <= longest and ids.max() < self._vocabulary

    def _checked(self, prepared: Prepared, cut: Cut) -> Prepared | Failed:
        length = prepared.shape[1]
        if length == 0:
            return Failed(InvalidItem("text: has no tokens; the model's tokenizer drops all of it"))
        if cut.max_length is not None and length > cut.max_length:
            limit = f"max_length = {cut.max_length} tokens"
            return Failed(InvalidItem(f"text: {length} tokens are more than {limit}"))
        largest = int(prepared[0].max())
        if largest >= self._vocabulary:
            # On CUDA it would end the process and every batch in it.
            token = self._tokenizer.convert_ids_to_tokens(largest)
            return Failed(InvalidItem(f"text: token {token!r} is unknown to the model"))
        return prepared

    def _usual(self, texts: Sequence[Any], cut: Cut) -> tuple[Columns, IsCut]:
        columns = self._call(texts, cut)

        def is_cut(place: int) -> bool:
            whole = self._call([texts[place]], cut._replace(truncate=False))
            return len(whole["input_ids"][0]) > len(columns["input_ids"][place])

        return [columns[name] for name in self.names], is_cut

    def _call(self, texts: Sequence[Any], cut: Cut) -> Any:
        self._tokenizer.truncation_side = cut.side
        is_cut = cut.truncate and cut.max_length is not None
        is_single = isinstance(texts[0], str)
        # Of pairs it takes all first texts, and then all second ones.
        columns = [list(texts)] if is_single else map(list, zip(*texts, strict=True))
        return self._tokenizer(
            *columns,
            padding=False,
            truncation=LONGEST if is_cut else False,
            max_length=cut.max_length if is_cut else None,
            return_attention_mask=False,
            verbose=False,  # it would log every long text; those are dealt with here
        )

    def _fast(self, texts: Sequence[Any], cut: Cut) -> tuple[Columns, IsCut]:
        """`_usual`, but without the offsets of tokens, which are five sixths of the work."""
        return self._encode(self._tokenizer.backend_tokenizer, texts, cut)

    def _encode(self, library: Any, texts: Sequence[Any], cut: Cut) -> tuple[Columns, IsCut]:
        # Other calls of the tokenizer leave their own limits behind.
        set_limit(library, cut.max_length if cut.truncate else None, cut.side)
        encodings = library.encode_batch_fast(texts)
        columns = [[getattr(each, ATTRIBUTES[name]) for each in encodings] for name in self.names]
        return columns, lambda place: bool(encodings[place].overflowing)

    def _is_fast(self) -> bool:
        """Whether the fast way works and gives the same tokens.

        Some classes of tokenizers do more than the library.
        """
        texts = [*PROBES, "word " * (self._max_length or 1)]
        pairs = [*zip(texts, reversed(texts), strict=True)]
        cuts = [self.usual_cut._replace(truncate=each) for each in (True, False)]
        try:
            return all(
                self._fast(probes, cut)[0] == self._usual(probes, cut)[0]
                for probes in (texts, pairs)
                for cut in cuts
            )
        except Exception:  # noqa: BLE001 - another kind of tokenizer, or another version
            return False
