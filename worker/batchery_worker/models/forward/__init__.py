"""What all forward passes have in common."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from batchery_worker.models.loading.tokenizer import Prepared


class Forward(Protocol):
    """Runs a model on a micro-batch.

    Attributes:
        name: For the log.
        pads: See `batchery.Model`.
    """

    name: str
    pads: bool

    def vectors(self, batch: Sequence[Prepared], pooling: str) -> Tensor:
        """Pooled token vectors, (B, D) float32, in batch order."""

    def logits(self, batch: Sequence[Prepared]) -> Tensor:
        """What the model's head says, (B, C) float32, in batch order."""

    def max_logits(self, batch: Sequence[Prepared]) -> Tensor:
        """The largest of what the model's head says of the tokens, (B, C) float32."""

    def token_logits(self, batch: Sequence[Prepared]) -> Tensor:
        """What the model's head says of each token, (T, C) float32, in batch order."""

    def token_vectors(self, batch: Sequence[Prepared]) -> Tensor:
        """Vectors of all tokens, (T, D) float32, in batch order."""
