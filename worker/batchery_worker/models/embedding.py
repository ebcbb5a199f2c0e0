"""Embeddings: one vector per text."""

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel

from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.models.forward import Forward
from batchery_worker.models.keywords import EmbeddingKeywords, read_keywords
from batchery_worker.models.loading.pooling_config import read_pooling_config
from batchery_worker.models.loading.source import ModelSource
from batchery_worker.models.loading.tokenizer import Prepared
from batchery_worker.models.text_model import Outputs, TextModel

logger = logging.getLogger(__name__)

#: Significant digits that every float32 survives.
DIGITS = 9


def shortened(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Rounds to nine significant digits.

    Args:
        values: An array of any shape.

    Returns:
        The same shape. Cast to float32, each number is exactly the given one. Written out, it is a
        third shorter. NaN and infinities stay.
    """
    exact = values.astype(np.float64)
    # Zero has no logarithm, and infinity no digits.
    with np.errstate(divide="ignore", invalid="ignore"):
        places = DIGITS - 1 - np.floor(np.log10(np.abs(exact)))
    usual = np.isfinite(places)
    scale = np.power(10.0, np.where(usual, places, 0.0))
    return np.where(usual, np.rint(exact * scale) / scale, exact)


class EmbeddingModel(TextModel):
    """Turns texts into vectors, with any text model of transformers.

    An item is a text. Keywords of a job: `prompt` (the name of a prompt), `normalize`, `dimensions`
    and `encoding` (`float` or `base64`); see `EmbeddingKeywords`. A result has the shape of
    `batchery.Embedding`.

    Prompts come from the settings and from the model's own files; the settings win.
    """

    auto_class = AutoModel

    def _finish_load(self, source: ModelSource, missing: Sequence[str]) -> None:
        # The pooler follows the token vectors. It is not used, and often missing.
        lost = [key for key in missing if "pooler" not in key.split(".")]
        if lost:
            raise ModelLoadError(
                f"model {source.name!r}: its checkpoint lacks {len(lost)} of its weights"
                f" ({', '.join(lost[:2])}); the weights are of another model than config.json"
            )
        if self.model.config.is_encoder_decoder:
            self.model = self.model.get_encoder()
        config = read_pooling_config(source, self.settings.pooling)
        self.prompts = {**config.prompts, **self.settings.prompts}
        self.default_prompt = self.settings.default_prompt or config.default_prompt
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ModelLoadError(
                f"model {source.name!r}: default_prompt = {self.default_prompt!r}, but there"
                f" {_are(self.prompts)}"
            )
        self.pooling = config.pooling or ("last" if _is_decoder(self.model) else "mean")
        where = "its files or settings" if config.pooling else "its architecture, a guess"
        logger.info("model %s: pooling is %s, from %s", source.name, self.pooling, where)

    def _check_trial(self, source: ModelSource, outputs: Outputs) -> None:
        self.dimensions = outputs.pending.wait().shape[1]
        if (self.settings.dimensions or 1) > self.dimensions:
            raise ModelLoadError(
                f"model {source.name!r}: dimensions = {self.settings.dimensions}, but its vectors"
                f" have {self.dimensions}"
            )

    def _prompt(self, keywords: Mapping[str, Any]) -> str:
        wanted = read_keywords(EmbeddingKeywords, keywords)
        if wanted.dimensions is not None and wanted.dimensions > self.dimensions:
            raise InvalidItem(
                f"keyword dimensions = {wanted.dimensions}: the model's vectors have"
                f" {self.dimensions}"
            )
        name = self.default_prompt if wanted.prompt is None else wanted.prompt
        if name is None:
            return ""
        if name not in self.prompts:
            raise InvalidItem(f"keyword prompt = {name!r:.80}: there {_are(self.prompts)}")
        return self.prompts[name]

    def forward(self, batch: Sequence[Prepared], **keywords: Any) -> Outputs:
        """Runs the model and pools; values are (B, D) float32, in batch order."""
        wanted = read_keywords(EmbeddingKeywords, keywords)
        scale = self.settings.normalize if wanted.normalize is None else wanted.normalize

        def compute() -> Tensor:
            vectors = self._values(self._pass, batch)
            # Without a limit, `[:, :None]` is everything.
            vectors = vectors[:, : wanted.dimensions or self.settings.dimensions]
            return normalize(vectors) if scale else vectors

        return self._outputs(compute, batch)

    def _values(self, forward: Forward, batch: Sequence[Prepared]) -> Tensor:
        return forward.vectors(batch, self.pooling)

    def _results(
        self, values: Tensor, tokens: Sequence[int], keywords: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        if read_keywords(EmbeddingKeywords, keywords).encoding == "float":
            vectors = shortened(values.numpy()).tolist()
        else:
            rows = values.numpy().astype("<f4", copy=False)
            vectors = [base64.b64encode(row.tobytes()).decode("ascii") for row in rows]
        return [
            {"tokens": count, "vector": vector}
            for count, vector in zip(tokens, vectors, strict=True)
        ]


def _is_decoder(model: torch.nn.Module) -> bool:
    """Whether tokens see only earlier ones, so that only the last one has seen the whole text."""
    return any(getattr(module, "is_causal", False) for module in model.modules())


def _are(prompts: Mapping[str, str]) -> str:
    return f"are {', '.join(sorted(prompts))}" if prompts else "are no prompts"
