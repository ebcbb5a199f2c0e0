"""What labels texts: classification, reranking, zero-shot classification, entities of tokens.

Scores and entities are those of transformers' pipelines, and a reranker's are those of
sentence-transformers.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    TokenClassificationPipeline,
)
from transformers.pipelines.token_classification import AggregationStrategy

from batchery.errors import InvalidItem
from batchery.outcomes import Failed
from batchery_worker.models.inputs import (
    ClassificationKeywords,
    RerankKeywords,
    TokenClassificationKeywords,
    ZeroShotKeywords,
    check_fields,
    check_text,
)
from batchery_worker.models.sentence_model import SentenceModel
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import Cut, Input, Located, Prepared, TokenIds, Truncated

#: What stands for the label in a template.
PLACE = "{}"

#: The query of items that are made of a text alone.
SAMPLE_QUERY = "what is it about"

#: One item: the text with each hypothesis, tokenized.
Sequences = Sequence[Prepared]


class ClassificationModel(TextModel):
    """Labels texts and pairs of texts, with any sequence classification model of transformers.

    An item is a text, a list of token ids, or `{"text": ..., "text_pair": ...}`, of which the
    longer text is cut if they are too long. Keywords of a job: see `ClassificationKeywords`. A
    result has the shape of `batchery.Classification`; labels are named as in the model's config.

    Scores are a softmax over the labels, or, where several labels may hold (the setting
    `multi_label`, else the config's `problem_type`) or there is one, a sigmoid of each. Those of a
    regression, by `problem_type`, are the model's outputs as they are, of any size.
    """

    auto_class = AutoModelForSequenceClassification

    keywords = ClassificationKeywords

    reading = "logits"

    trained_part = ("classification head", "classification")

    def _finish_load(self) -> None:
        config = self.model.config
        self.labels = [str(config.id2label[index]) for index in range(config.num_labels)]
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels of id2label have the same name; rename one")
        self._width = config.num_labels
        self.multi_label = self.settings.multi_label
        self._is_regression = self.multi_label is None and config.problem_type == "regression"
        if self.multi_label is None:
            is_single = config.num_labels == 1
            self.multi_label = is_single or config.problem_type == "multi_label_classification"

    def _cut(self, options: Any) -> Cut:
        return super()._cut(options)._replace(max_length=options.max_length)

    def _input(self, item: Any, prompt: str) -> Input:
        if not isinstance(item, dict):
            return super()._input(item, prompt)
        text, pair = check_fields(item, ("text", "text_pair"), self.settings.max_chars)
        return text, pair

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Scores, (B, C)."""
        if options.raw_scores or self._is_regression:
            return values
        return values.sigmoid() if self.multi_label else values.softmax(dim=-1)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        top_k = self._read_keywords(keywords).top_k
        scores, places = values.topk(min(top_k or 1, len(self.labels)), dim=-1)
        heads, results = outputs.heads, []
        for head, row, row_places in zip(heads, scores.tolist(), places.tolist(), strict=True):
            named = {
                self.labels[place]: score for place, score in zip(row_places, row, strict=True)
            }
            best = self.labels[row_places[0]]
            result = {**head, "label": best, "score": row[0]}
            results.append(result if top_k is None else {**result, "scores": named})
        return results


class RerankModel(SentenceModel):
    """Scores texts for a query, with any cross-encoder: a classification model of one label.

    An item is `{"query": ..., "text": ...}`. Of a pair that is too long, the longer one is cut.
    Keywords of a job: see `RerankKeywords`. A result has the shape of `batchery.Score`.
    """

    auto_class = AutoModelForSequenceClassification

    library_class = "CrossEncoder"

    keywords = RerankKeywords

    reading = "logits"

    trained_part = ("classification head", "reranking")

    _width = 1

    def _finish_load(self) -> None:
        labels = self.library.num_labels
        if labels != 1:
            raise ValueError(
                f"has {labels} labels, and a reranker has one; kind = 'classification' takes pairs"
                " of texts, too"
            )

    def sample_item(self, text: str) -> dict[str, str]:
        """An item that has this text, to check, warm up or measure the model with."""
        return {"query": SAMPLE_QUERY, "text": text}

    def _input(self, item: Any, prompt: str) -> Input:  # noqa: ARG002 (the library's code puts it)
        query, text = check_fields(item, ("query", "text"), self.settings.max_chars)
        return query, text

    def _read_features(self, features: Mapping[str, Any]) -> Tensor:
        """The model's outputs, (B, 1)."""
        scores: Tensor = features["scores"].float()
        return scores.reshape(-1, 1)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        # In float32 all outputs from 17 on would have the score 1, and no order.
        scores = values[:, 0].double()
        if not self._read_keywords(keywords).raw_scores:
            scores = scores.sigmoid()
        return [
            {**head, "score": score}
            for head, score in zip(outputs.heads, scores.tolist(), strict=True)
        ]


class ZeroShotModel(TextModel):
    """Finds which labels fit a text, with models that know whether one text follows from another.

    Each label makes a hypothesis, such as "This example is sports.". The model says how far it
    follows from the text. All hypotheses of a text share a forward pass.

    An item is a text, or a list of token ids. Of a pair that is too long, the text is cut. Keywords
    of a job: see `ZeroShotKeywords`. A result has the shape of `batchery.Classification`, with the
    scores of all labels.
    """

    auto_class = AutoModelForSequenceClassification

    keywords = ZeroShotKeywords

    reading = "logits"

    sample_keywords: ClassVar[Mapping[str, Any]] = {"labels": ["one", "another"]}

    trained_part = ("classification head", "natural language inference")

    _width = 2

    def _finish_load(self) -> None:
        config = self.model.config
        places = [at for name, at in config.label2id.items() if name.lower().startswith("entail")]
        if not places:
            raise ValueError(
                f"none of its labels begins with 'entail': {', '.join(config.label2id)}; name a"
                " model for natural language inference, or correct label2id in its config.json"
            )
        # As the pipeline: the opposite is the first label, or the last one.
        self._entailment = places[0]
        self._contradiction = 0 if self._entailment else -1

    def _read_keywords(self, keywords: Mapping[str, Any]) -> ZeroShotKeywords:
        options: ZeroShotKeywords = super()._read_keywords(keywords)
        if len(set(options.labels)) < len(options.labels):
            raise InvalidItem("keyword labels: two of them are the same")
        template = options.hypothesis_template
        if template.count(PLACE) != 1 or {*PLACE} & {*template.replace(PLACE, "")}:
            raise InvalidItem(
                f"keyword hypothesis_template = {template!r:.80}: needs {PLACE} once, in the place"
                " of the label, and no other braces"
            )
        return options

    def _encode(self, inputs: Sequence[Any], options: Any) -> list[Any]:
        hypotheses = [
            check_text(
                "keyword labels",
                options.hypothesis_template.replace(PLACE, label),
                self.settings.max_chars,
            )
            for label in options.labels
        ]
        pairs: list[Input] = [
            TokenIds(text.ids, pair=each) if isinstance(text, TokenIds) else (text, each)
            for text in inputs
            for each in hypotheses
        ]
        try:
            encoded = self._tokenize(pairs, self._cut(options)._replace(only_first=True))
        except Exception as error:  # noqa: BLE001 (that of the library, where no text would be left)
            raise InvalidItem(
                f"keyword labels: one leaves no room for a text in max_length = {self.max_length}"
                f" tokens ({error})"
            ) from None
        together = [
            encoded[at : at + len(hypotheses)] for at in range(0, len(pairs), len(hypotheses))
        ]
        # Of an item with wrong sequences, what is wrong with the first of them.
        return [next((one for one in each if isinstance(one, Failed)), each) for each in together]

    def tokens(self, prepared: Sequences) -> int:
        """Tokens of all sequences of an item, with the padding that they need themselves."""
        lengths = [sequence.shape[1] for sequence in prepared]
        return max(lengths) * len(lengths) if self.pads else sum(lengths)

    def head(self, prepared: Sequences) -> dict[str, Any]:
        """Of all its sequences together."""
        head: dict[str, Any] = {"tokens": sum(sequence.shape[1] for sequence in prepared)}
        if any(isinstance(sequence, Truncated) for sequence in prepared):
            head["truncated"] = True
        return head

    def _sequences(self, batch: Sequence[Sequences]) -> Sequence[Prepared]:
        return [sequence for item in batch for sequence in item]

    def _finish(self, values: Tensor, options: Any) -> Tensor:
        """Scores, (B, C), for the labels of the keywords."""
        logits = values.view(-1, len(options.labels), values.shape[1])
        entailment = logits[..., self._entailment]
        # Among one label, it would have all of the probability.
        if options.multi_label or len(options.labels) == 1:
            return (entailment - logits[..., self._contradiction]).sigmoid()
        return entailment.softmax(dim=-1)

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        labels = self._read_keywords(keywords).labels
        places = np.argsort(-values.numpy(), axis=1, kind="stable").tolist()
        results = []
        for head, row, order in zip(outputs.heads, values.tolist(), places, strict=True):
            scores = {labels[place]: row[place] for place in order}
            best = labels[order[0]]
            results.append({**head, "label": best, "score": scores[best], "scores": scores})
        return results


class EntityPipeline(TokenClassificationPipeline):
    """Of transformers' pipeline only what makes entities of logits, and asks for no more."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def group_sub_entities(self, entities: list[dict[str, Any]]) -> dict[str, Any]:
        """As there, without words and NaN, which take most of the time."""
        return {
            "entity_group": entities[0]["entity"].split("-", 1)[-1],
            "score": sum(float(each["score"]) for each in entities) / len(entities),
            "start": entities[0]["start"],
            "end": entities[-1]["end"],
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

    trained_part = ("token classification head", "token classification")

    def _finish_load(self) -> None:
        if not self.tokenizer.is_fast:
            raise ValueError(
                "its tokenizer does not say where tokens stand in a text; it needs a tokenizer.json"
            )
        self._width = self.model.config.num_labels
        self._pipeline = EntityPipeline(self.model, self.tokenizer)
        # It says so for each token of a vocabulary without marks.
        warnings.filterwarnings("ignore", "Tokenizer does not support real words")

    def _input(self, item: Any, prompt: str) -> str:  # noqa: ARG002 (there are no prompts)
        return check_text("text", item, self.settings.max_chars)

    def _encode(self, inputs: Sequence[Any], options: Any) -> list[Any]:
        return self._tokenize.located(list(inputs), self._cut(options))

    def tokens(self, prepared: Located) -> int:
        """Length of a tokenized text in tokens, special ones included."""
        return super().tokens(prepared.tokens)

    def head(self, prepared: Located) -> dict[str, Any]:
        """Of its tokens."""
        return super().head(prepared.tokens)

    def _sequences(self, batch: Sequence[Located]) -> Sequence[Prepared]:
        return [located.tokens for located in batch]

    def _results(
        self, values: Tensor, outputs: Outputs, keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        options = self._read_keywords(keywords)
        lengths = [head["tokens"] for head in outputs.heads]
        return [
            {**head, "entities": self._find_entities(located, logits, options)}
            for head, located, logits in zip(
                outputs.heads, outputs.batch, self.by_text(values, lengths), strict=True
            )
        ]

    def _find_entities(
        self, located: Located, logits: Tensor, options: TokenClassificationKeywords
    ) -> list[dict[str, Any]]:
        found = self._pipeline.postprocess(  # type: ignore[no-untyped-call]
            [
                {
                    "logits": logits[None],
                    "sentence": located.text,
                    "input_ids": located.tokens[:1],
                    "offset_mapping": [located.offsets],
                    "special_tokens_mask": torch.tensor([located.is_special]),
                }
            ],
            AggregationStrategy(options.aggregation),
            options.ignore_labels,
        )
        return [
            {
                "label": each["entity" if options.aggregation == "none" else "entity_group"],
                "score": float(each["score"]),
                "text": located.text[each["start"] : each["end"]],
                "start": each["start"],
                "end": each["end"],
            }
            for each in found
        ]
