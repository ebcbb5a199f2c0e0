"""Vectors of pictures, and of texts in the same space where a model knows both."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

from batchery.errors import InvalidItem
from batchery_worker.models.inputs import ImageEmbeddingKeywords
from batchery_worker.models.source import check_weights
from batchery_worker.models.text_items import encode_results
from batchery_worker.models.vision.image_model import ImageModel
from batchery_worker.models.vision.reader import ImageTextReader, TokenizedText


class TowerModel(ImageModel):
    """A model whose pictures, and perhaps texts, become one vector each."""

    Reader = ImageTextReader

    reader: ImageTextReader

    auto_class: ClassVar[Any] = AutoModel

    def _check_config(self, config: Any) -> None:
        super()._check_config(config)
        self.has_texts = hasattr(config, "text_config")

    def _check_missing(self, missing: Sequence[str]) -> None:
        check_weights(missing, *self.trained_part)
        # Classifiers are saved without the pooler, which is random then.
        self._has_pooler = not any("pooler" in key.split(".") for key in missing)

    def _finish_load(self) -> None:
        super()._finish_load()
        takes_pictures = self.model.main_input_name == "pixel_values"
        if not takes_pictures and not hasattr(self.model, "get_image_features"):
            raise ValueError(f"takes {self.model.main_input_name}, and no pictures")
        if self.has_texts and self.settings.pooling != "auto":
            raise ValueError(f"pooling = {self.settings.pooling!r}, but its files decide that")

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:  # noqa: ARG002
        """Vectors, (B, D)."""
        if isinstance(items[0], TokenizedText):
            return [self._embed_texts(items)]
        return [self._embed_pictures(items)]

    def _embed_texts(self, texts: Sequence[TokenizedText]) -> Tensor:
        filled = self.reader.tokenizer.pad(
            {name: [each.inputs[name] for each in texts] for name in texts[0].inputs},
            return_tensors="np",
        )
        vectors: Tensor = self.model.get_text_features(**self._send(filled)).pooler_output
        return vectors

    def _embed_pictures(self, pictures: Sequence[Any]) -> Tensor:
        inputs = self._stack(pictures)
        if self.has_texts:
            found: Tensor = self.model.get_image_features(**inputs).pooler_output
            return found
        output, pooling = self.model(**inputs), self.settings.pooling
        pooled: Tensor | None = getattr(output, "pooler_output", None)
        if pooling == "auto" and self._has_pooler and pooled is not None:
            return pooled.flatten(1)
        tokens: Tensor = output.last_hidden_state
        if pooling == "mean":
            return tokens.mean(dim=1)
        return tokens[:, -1 if pooling == "last" else 0]


class ImageEmbeddingModel(TowerModel):
    """Turns pictures, and texts of models such as CLIP and SigLIP, into vectors of one space.

    An item is a picture, or `{"text": ...}`. Keywords of a job: see `ImageEmbeddingKeywords`. A
    result has the shape of `batchery.Embedding`.
    """

    keywords = ImageEmbeddingKeywords

    # Tolerances are for numbers up to 1.
    sample_keywords: ClassVar[Mapping[str, Any]] = {"normalize": True}

    #: D of its vectors; 0 before the first pass.
    dimensions = 0

    _gives_json = False

    def give_json(self) -> None:
        """Makes results `Encoded` from now on: they leave the process."""
        self._gives_json = True

    def _check(self) -> None:
        super()._check()
        if (self.settings.dimensions or 1) > self.dimensions:
            has = f"its vectors have {self.dimensions}"
            raise ValueError(f"dimensions = {self.settings.dimensions}, but {has}")

    def _read_keywords(self, keywords: Mapping[str, Any]) -> ImageEmbeddingKeywords:
        options: ImageEmbeddingKeywords = super()._read_keywords(keywords)
        if self.dimensions and (options.dimensions or 1) > self.dimensions:
            raise InvalidItem(
                f"keyword dimensions = {options.dimensions}: the model's vectors have"
                f" {self.dimensions}"
            )
        return options

    def _compute(self, items: Sequence[Any], options: Any) -> Sequence[Tensor]:
        (vectors,) = super()._compute(items, options)
        self.dimensions = vectors.shape[1]
        vectors = vectors[:, : options.dimensions or self.settings.dimensions].float()
        scale = self.settings.normalize if options.normalize is None else options.normalize
        return [normalize(vectors, dim=-1) if scale else vectors]

    def _results(
        self, items: Sequence[Any], values: Sequence[Tensor], options: Any
    ) -> Sequence[Any]:
        vectors: Any = values[0].numpy()
        if options.encoding == "base64":
            vectors = [b64encode(row.astype("<f4").tobytes()).decode("ascii") for row in vectors]
        encoded = encode_results([self.head(each) for each in items], vector=vectors)
        return encoded if self._gives_json else [each.value for each in encoded]
