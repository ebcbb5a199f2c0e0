"""From the labels of tokens to entities: the parts of a text that a model has found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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

    Args:
        tokens: Tokens of the text, in order.
        labels: Name of each label.
        aggregation: As in `TokenClassificationKeywords`.

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
