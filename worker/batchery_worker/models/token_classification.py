"""Token classification: the names, places and other entities in a text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForTokenClassification

from batchery.errors import ModelLoadError
from batchery.outcomes import Failed
from batchery_worker.models.inputs import TokenClassificationKeywords, check_text
from batchery_worker.models.source import ModelSource, check_head
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import Located, Prepared

#: The label of what is no entity.
OUTSIDE = "O"


#: Scores of the labels, (C,) float32.
Scores = NDArray[np.float32]


class Word(NamedTuple):
    """One token or several, with the scores of its labels.

    Attributes:
        start: Where it begins in the text, in characters.
        end: Where it ends.
        scores: Probabilities of the labels.
        continues: Whether it is a later part of a word.
    """

    start: int
    end: int
    scores: Scores
    continues: bool = False


class LabelSpan(NamedTuple):
    """A part of a text with a label.

    Attributes:
        label: As in the model's config; without B- and I- once neighbours were joined.
        score: Its probability, or the mean of those of its parts.
        start: Where it begins, in characters.
        end: Where it ends.
    """

    label: str
    score: float
    start: int
    end: int


def find_entities(
    tokens: Sequence[Word], labels: Sequence[str], aggregation: str
) -> list[LabelSpan]:
    """Finds the entities of a text.

    Returns:
        Entities, in order, without what is outside of all of them.
    """
    merge = MERGES.get(aggregation)
    words = tokens if merge is None else [merge(parts) for parts in _by_word(tokens)]
    entities: Iterable[LabelSpan] = [_labelled(word, labels) for word in words]
    if aggregation != "none":
        entities = map(_joined, _by_tag(entities))
    return [each for each in entities if each.label != OUTSIDE]


def _by_word(tokens: Iterable[Word]) -> list[list[Word]]:
    """Tokens that are parts of one word, together."""
    words: list[list[Word]] = []
    for token in tokens:
        if token.continues and words:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _by_tag(entities: Iterable[LabelSpan]) -> list[list[LabelSpan]]:
    """Neighbours that belong to one entity, together."""
    groups: list[list[LabelSpan]] = []
    for entity in entities:
        begins = entity.label.startswith("B-")
        if groups and not begins and _tag(groups[-1][-1]) == _tag(entity):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    return groups


def _tag(entity: LabelSpan) -> str:
    label = entity.label
    return label[2:] if label.startswith(("B-", "I-")) else label


def _labelled(word: Word, labels: Sequence[str]) -> LabelSpan:
    best = int(word.scores.argmax())
    return LabelSpan(labels[best], float(word.scores[best]), word.start, word.end)


def _joined(parts: Sequence[LabelSpan]) -> LabelSpan:
    score = float(np.mean([part.score for part in parts]))
    return LabelSpan(_tag(parts[0]), score, parts[0].start, parts[-1].end)


def _first(parts: Sequence[Word]) -> Scores:
    return parts[0].scores


def _average(parts: Sequence[Word]) -> Scores:
    mean: Scores = np.mean([part.scores for part in parts], axis=0)
    return mean


def _surest(parts: Sequence[Word]) -> Scores:
    return max((part.scores for part in parts), key=np.max)


def _merging(choose: Callable[[Sequence[Word]], Scores]) -> Callable[[Sequence[Word]], Word]:
    return lambda parts: Word(parts[0].start, parts[-1].end, choose(parts))


#: How the tokens of a word become one, by the name of the aggregation.
MERGES: Mapping[str, Callable[[Sequence[Word]], Word]] = {
    "first": _merging(_first),
    "average": _merging(_average),
    "max": _merging(_surest),
}


def entity_fields(entity: LabelSpan, text: str) -> dict[str, Any]:
    """An entity as it stands in a result."""
    return {
        "label": entity.label,
        "score": entity.score,
        "text": text[entity.start : entity.end],
        "start": entity.start,
        "end": entity.end,
    }


class TokenClassificationModel(TextModel):
    """Finds entities in texts, with any token classification model of transformers.

    An item is a text; token ids have no places in a text. Keywords of a job: see
    `TokenClassificationKeywords`. A result has the shape of `batchery.TokenClassification`.
    """

    auto_class = AutoModelForTokenClassification

    per_token = True

    keywords = TokenClassificationKeywords

    reading = "token_logits"

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_head(source, missing, "token classification head", "token classification")
        if not self.tokenizer.is_fast:
            raise ModelLoadError(
                f"model {source.name!r}: its tokenizer does not say where tokens stand in a text;"
                " it needs a tokenizer.json"
            )
        config = self.model.config
        self.labels = [str(config.id2label[index]) for index in range(config.num_labels)]
        # Only tokenizers that mark later parts of a word know where words begin.
        model = self.tokenizer.backend_tokenizer.model
        self._mark = getattr(model, "continuing_subword_prefix", None) or ""

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        shape = tuple(outputs.pending.wait().shape)
        options = (outputs.heads[0]["tokens"], len(self.labels))
        if shape != options:
            raise ModelLoadError(
                f"model {source.name!r}: gives scores of shape {shape}, not {options}; it is not a"
                " token classification model"
            )

    def _input(self, item: Any, prompt: str) -> str:  # noqa: ARG002 (there are no prompts)
        return check_text("text", item, self.settings.max_chars)

    def _tokenized(self, items: Sequence[Any], options: Any) -> list[Any]:
        inputs = self._inputs(items, "")
        texts = [each for each in inputs if isinstance(each, str)]
        located = iter(self._tokenize.located(texts, self._cut(options)))
        return [each if isinstance(each, Failed) else next(located) for each in inputs]

    def tokens(self, prepared: Located) -> int:
        """Length of a tokenized text in tokens, special ones included."""
        return super().tokens(prepared.tokens)

    def _head(self, prepared: Located) -> dict[str, Any]:
        return super()._head(prepared.tokens)

    def _sequences(self, batch: Sequence[Located]) -> Sequence[Prepared]:
        return [located.tokens for located in batch]

    def _finish(self, values: Tensor, options: Any) -> Tensor:  # noqa: ARG002 (they are for spans)
        """Probabilities, (T, C)."""
        return values.softmax(dim=-1)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        aggregation = self._read_keywords(keywords).aggregation
        lengths = [head["tokens"] for head in outputs.heads]
        results = []
        for head, located, scores in zip(
            outputs.heads, outputs.batch, self.by_text(values, lengths), strict=True
        ):
            found = find_entities(self._words(located, scores), self.labels, aggregation)
            fields = [entity_fields(entity, located.text) for entity in found]
            results.append({**head, "entities": fields})
        return results

    def _words(self, located: Located, scores: Tensor) -> list[Word]:
        """The tokens of a text, without special ones."""
        names = self.tokenizer.convert_ids_to_tokens(located.tokens[0].tolist())
        return [
            Word(start, end, row, self._continues(name, start, located.text))
            for name, (start, end), is_special, row in zip(
                names, located.offsets, located.is_special, scores.numpy(), strict=True
            )
            if not is_special
        ]

    def _continues(self, name: str, start: int, text: str) -> bool:
        """Whether a token is a later part of a word."""
        if name == self.tokenizer.unk_token:
            return False
        if self._mark:
            return name.startswith(self._mark)
        # Where tokens bear no mark, a word begins behind white space, or with it.
        return start > 0 and not any(map(str.isspace, text[start - 1 : start + 1]))
