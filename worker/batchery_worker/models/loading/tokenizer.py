"""From texts to tokens, for a whole batch at once: per text there is little more than a slice."""

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

#: Columns of a tokenized batch, in the order of the names: for each text a list of numbers.
Columns = list[list[list[int]]]

#: Where the tokenizers library fills a column from, by transformers' name of it.
ATTRIBUTES = {"input_ids": "ids", "token_type_ids": "type_ids"}

#: Both ways of tokenizing are compared with these, and with a text beyond the limit: other scripts,
#: special tokens spelled out, white space.
PROBES = (
    "a",
    "The quick brown fox, 1984: don't!  Naïve Zürich\tжизнь 数字 🙂\n",
    "[CLS] <s> </s> [PAD] <|endoftext|> [MASK]",
    " ",
)


class TextTokenizer:
    """A model's tokenizer, with what the model allows.

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
        """Finds the fastest way that gives what the tokenizer gives.

        Args:
            tokenizer: Of transformers.
            wanted: Inputs that the model takes, token ids first; those that the tokenizer makes
                are kept.
            vocabulary: Tokens that the model knows.
            max_length: Longest text in tokens; None where nothing limits it.
            truncate: Cut what is longer; else it is refused.
        """
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._cut = max_length if truncate else None
        self.names = [name for name in wanted if name in self._call(["a"])]
        self._columns: Callable[[list[str]], Columns] = self._usual
        if self._is_fast():
            self._columns = self._fast

    def __call__(self, texts: list[str]) -> list[Prepared | Failed]:
        """Tokenizes texts.

        Returns:
            For each, in order, its tokens, not padded; `Failed` with an `InvalidItem` where there
            are none, too many, or one that the model does not know.
        """
        if not texts:
            return []
        columns = self._columns(texts)
        lengths = list(map(len, columns[0]))
        rows = np.empty((len(columns), sum(lengths)), dtype=np.int64)
        for row, column in zip(rows, columns, strict=True):
            row[:] = np.fromiter(chain.from_iterable(column), np.int64, rows.shape[1])
        tokenized = [rows[:, start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
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
            # On CUDA it would be the end of the process, and of every batch in it.
            token = self._tokenizer.convert_ids_to_tokens(largest)
            return Failed(InvalidItem(f"text: token {token!r} is unknown to the model"))
        return prepared

    def _usual(self, texts: list[str]) -> Columns:
        columns = self._call(texts)
        return [columns[name] for name in self.names]

    def _call(self, texts: list[str]) -> Any:
        return self._tokenizer(
            texts,
            padding=False,
            truncation=self._cut is not None,
            max_length=self._cut,
            return_attention_mask=False,
            verbose=False,  # it would log every long text; those are dealt with here
        )

    def _fast(self, texts: list[str]) -> Columns:
        """The same without the place of each token in its text, a sixth of the work."""
        # Whoever else calls the tokenizer leaves other limits behind.
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
        return [[getattr(each, ATTRIBUTES[name]) for each in encodings] for name in self.names]

    def _is_fast(self) -> bool:
        """Whether the tokenizer is of the kind that knows the fast way, and nothing else is lost.

        Classes of tokenizers may do things of their own around the library.
        """
        probes = [*PROBES, "word " * (self._cut or 1)]
        try:
            return self._fast(probes) == self._usual(probes)
        except Exception:  # noqa: BLE001 - another kind of tokenizer, or another version
            return False


def load_tokenizer(source: ModelSource) -> Any:
    """Loads the tokenizer; transformers would make an empty one where there are no files of it.

    Raises:
        ModelLoadError: There is none.
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
