"""From texts to tokens, a whole batch at once, with little work per text."""

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer
from transformers.tokenization_utils_base import TruncationStrategy
from transformers.utils.generic import PaddingStrategy

from batchery.errors import InvalidItem, ModelLoadError
from batchery.outcomes import Failed
from batchery_worker.models.loading.source import ModelSource, reason

#: One tokenized text: a row per model input, token ids first, (I, L) int64.
Prepared = NDArray[np.int64]


class Truncated(np.ndarray[Any, np.dtype[np.int64]]):
    """The tokens of a text that was longer than the limit and lost its end."""


#: Columns of a tokenized batch, in the order of the names: for each text a list of numbers.
Columns = list[list[list[int]]]

#: Says of a text, by its place in the batch, whether it lost its end.
IsCut = Callable[[int], bool]

#: Attributes of the tokenizers library, by transformers' name of the column.
ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}

#: Texts on which both ways of tokenizing are compared: other scripts, special tokens, white space;
#: besides, a text beyond the limit.
PROBES = (
    "a",
    "The quick brown fox, 1984: don't!  Naïve Zürich\tжизнь 数字 🙂\n",
    "[CLS] <s> </s> [PAD] <|endoftext|> [MASK]",
    " ",
)


class TextTokenizer:
    """A model's tokenizer, within the limits of the model.

    Attributes:
        names: Model inputs that a tokenized text has, in the order of its rows.
    """

    def __init__(
        self,
        tokenizer: Any,
        wanted: Collection[str],
        *,
        vocabulary: int,
        max_length: int | None,
        truncate: bool,
    ) -> None:
        """Finds the fastest way that gives the same tokens.

        Args:
            tokenizer: The tokenizer of transformers.
            wanted: Inputs of the model, token ids first. Inputs that the tokenizer does not make
                are left out.
            vocabulary: Number of tokens that the model knows.
            max_length: Maximum length of a text in tokens; None if unlimited.
            truncate: Whether longer texts are cut; otherwise they are refused.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._cut = max_length if truncate else None
        self.names = [name for name in wanted if name in self._call(["a"])]
        self._columns: Callable[[list[str]], tuple[Columns, IsCut]] = self._usual
        if self._is_fast():
            self._columns = self._fast

    def __call__(self, texts: list[str]) -> list[Prepared | Failed]:
        """Tokenizes texts.

        Returns:
            The tokens of each text, in order, not padded; `Truncated` where a text lost its end.
            `Failed` with an `InvalidItem` for a text with no tokens, too many, or one that the
            model does not know.
        """
        if not texts:
            return []
        columns, is_cut = self._columns(texts)
        lengths = list(map(len, columns[0]))
        rows = np.empty((len(columns), sum(lengths)), dtype=np.int64)
        for row, column in zip(rows, columns, strict=True):
            row[:] = np.fromiter(chain.from_iterable(column), np.int64, rows.shape[1])
        tokenized = [rows[:, start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
        for place, length in enumerate(lengths):
            if length == self._cut and is_cut(place):
                tokenized[place] = tokenized[place].view(Truncated)
        if self._all_fit(rows[0], lengths):
            return list(tokenized)
        return [self._checked(each) for each in tokenized]

    def _all_fit(self, ids: NDArray[np.int64], lengths: Sequence[int]) -> bool:
        longest = max(lengths) if self._max_length is None else self._max_length
        return 0 < min(lengths) <= max(lengths) <= longest and ids.max() < self._vocabulary

    def _checked(self, prepared: Prepared) -> Prepared | Failed:
        length = prepared.shape[1]
        if length == 0:
            return Failed(InvalidItem("text: has no tokens; the model's tokenizer drops all of it"))
        if self._max_length is not None and length > self._max_length:
            limit = f"max_length = {self._max_length} tokens"
            return Failed(InvalidItem(f"text: {length} tokens are more than {limit}"))
        largest = int(prepared[0].max())
        if largest >= self._vocabulary:
            # On CUDA it would end the process and every batch in it.
            token = self._tokenizer.convert_ids_to_tokens(largest)
            return Failed(InvalidItem(f"text: token {token!r} is unknown to the model"))
        return prepared

    def _usual(self, texts: list[str]) -> tuple[Columns, IsCut]:
        columns = self._call(texts)

        def is_cut(place: int) -> bool:
            whole = self._call([texts[place]], truncate=False)
            return len(whole["input_ids"][0]) > len(columns["input_ids"][place])

        return [columns[name] for name in self.names], is_cut

    def _call(self, texts: list[str], *, truncate: bool = True) -> Any:
        cut = self._cut if truncate else None
        return self._tokenizer(
            texts,
            padding=False,
            truncation=cut is not None,
            max_length=cut,
            return_attention_mask=False,
            verbose=False,  # it would log every long text; those are dealt with here
        )

    def _fast(self, texts: list[str]) -> tuple[Columns, IsCut]:
        """`_usual`, but without the offsets of tokens, which are five sixths of the work."""
        # Other calls of the tokenizer leave their own limits behind.
        strategy = "do_not_truncate" if self._cut is None else "longest_first"
        self._tokenizer.set_truncation_and_padding(
            padding_strategy=PaddingStrategy.DO_NOT_PAD,
            truncation_strategy=TruncationStrategy(strategy),
            max_length=self._cut,
            stride=0,
            pad_to_multiple_of=None,
            padding_side=None,
        )
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts)
        columns = [[getattr(each, ATTRIBUTES[name]) for each in encodings] for name in self.names]
        return columns, lambda place: bool(encodings[place].overflowing)

    def _is_fast(self) -> bool:
        """Whether the fast way works and gives the same tokens.

        Some classes of tokenizers do more than the library.
        """
        probes = [*PROBES, "word " * (self._cut or 1)]
        try:
            return self._fast(probes)[0] == self._usual(probes)[0]
        except Exception:  # noqa: BLE001 - another kind of tokenizer, or another version
            return False


def load_tokenizer(source: ModelSource) -> Any:
    """Loads the tokenizer. Without its files, transformers would make an empty one.

    Raises:
        ModelLoadError: The model has no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.name, **source.options)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f"model {source.name!r}: has no tokenizer, so it cannot take texts: {reason(error)}"
        ) from error
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if not any(source.path(file) for file in files):
        raise ModelLoadError(
            f"model {source.name!r}: has no tokenizer, so it cannot take texts:"
            f" none of {', '.join(files)} is there"
        )
    return tokenizer
