"""Zero-shot classification: which of any labels a text is about."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from batchery.errors import InvalidItem, ModelLoadError
from batchery.outcomes import Failed
from batchery_worker.models.inputs import ZeroShotKeywords, check_text
from batchery_worker.models.source import ModelSource, check_head
from batchery_worker.models.text_model import Outputs, TextModel
from batchery_worker.models.tokenizer import Input, Prepared, TokenIds, Truncated

#: What stands for the label in a template.
PLACE = "{}"

#: One item: the text with each hypothesis, tokenized.
Sequences = Sequence[Prepared]


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

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        check_head(source, missing, "classification head", "natural language inference")
        config = self.model.config
        names = [str(config.id2label[index]) for index in range(config.num_labels)]
        self._entailment = _place(source, names, "entail")
        self._contradiction = _place(source, names, "contradict", "not_entail", "not entail")

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        shape = outputs.pending.wait().shape[1:]
        if shape != (len(self.sample_keywords["labels"]),):
            raise ModelLoadError(
                f"model {source.name!r}: gives {tuple(shape)} scores; it is not a text"
                " classification model"
            )

    def _read_keywords(self, keywords: Mapping[str, Any]) -> ZeroShotKeywords:
        options: ZeroShotKeywords = super()._read_keywords(keywords)
        if len(set(options.labels)) < len(options.labels):
            raise InvalidItem("keyword labels: two of them are the same")
        if options.hypothesis_template.count(PLACE) != 1:
            raise InvalidItem(
                f"keyword hypothesis_template = {options.hypothesis_template!r:.80}: needs {PLACE}"
                " once, in the place of the label"
            )
        return options

    def _tokenized(self, items: Sequence[Any], options: Any) -> list[Any]:
        hypotheses = [options.hypothesis_template.replace(PLACE, label) for label in options.labels]
        self._check_hypotheses(hypotheses)
        texts = self._inputs(items, "")
        pairs = [
            _paired(text, hypothesis)
            for text in texts
            if not isinstance(text, Failed)
            for hypothesis in hypotheses
        ]
        tokenized = iter(self._tokenize(pairs, self._cut(options)._replace(only_first=True)))
        return [
            each if isinstance(each, Failed) else _together([next(tokenized) for _ in hypotheses])
            for each in texts
        ]

    def _check_hypotheses(self, hypotheses: Sequence[str]) -> None:
        """Raises InvalidItem if one is too long, or leaves no room for a text."""
        for hypothesis in hypotheses:
            check_text("keyword labels", hypothesis, self.settings.max_chars)
        if self.max_length is None:
            return
        room = self.max_length - self._tokenize.special_tokens_of_pair
        for hypothesis in hypotheses:
            length = self._tokenize.count(hypothesis)
            if length >= room:
                raise InvalidItem(
                    f"keyword labels: {length} tokens of {hypothesis!r:.80} leave no room for a"
                    f" text in max_length = {self.max_length} tokens"
                )

    def tokens(self, prepared: Sequences) -> int:
        """Tokens of all sequences of an item, with the padding that they need themselves."""
        lengths = [sequence.shape[1] for sequence in prepared]
        return max(lengths) * len(lengths) if self.pads else sum(lengths)

    def _head(self, prepared: Sequences) -> dict[str, Any]:
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


def _place(source: ModelSource, names: Sequence[str], *starts: str) -> int:
    """The place of the first label that begins so. Raises ModelLoadError if none does."""
    for place, name in enumerate(names):
        if name.lower().startswith(starts):
            return place
    raise ModelLoadError(
        f"model {source.name!r}: none of its labels begins with {starts[0]!r}: {', '.join(names)};"
        " name a model for natural language inference, or correct id2label in its config.json"
    )


def _paired(text: Any, hypothesis: str) -> Input:
    if isinstance(text, TokenIds):
        return TokenIds(text.ids, pair=hypothesis)
    return text, hypothesis


def _together(sequences: list[Any]) -> list[Prepared] | Failed:
    """The sequences of one item, or what is wrong with the first wrong one."""
    failed = [each for each in sequences if isinstance(each, Failed)]
    return failed[0] if failed else sequences
