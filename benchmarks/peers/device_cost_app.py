"""An app for `device_cost.py`: a model that answers at once, as an embedding model would."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from celery import Celery

from batchery import Model, install, register
from batchery_worker.ipc.values import Encoded
from batchery_worker.models.embedding import encoded_results

url = os.environ["DEVICE_COST_REDIS"]
app = install(Celery("device_cost", broker=url, backend=url, set_as_current=False))


class Vectors(Model):
    """One and the same matrix for every batch; what comes after the model is the real thing."""

    def load(self, device: str) -> None:  # noqa: ARG002 - it computes nothing
        """Makes the matrix."""
        values = np.random.default_rng(0).normal(size=(512, 384)).astype(np.float32)
        self.values = values / np.linalg.norm(values, axis=1, keepdims=True)

    def forward(self, batch: Sequence[Any], **_: Any) -> Any:
        """One row per item."""
        return self.values[: len(batch)]

    def postprocess(self, outputs: Any, **_: Any) -> list[Encoded]:
        """As an embedding model makes its results."""
        return encoded_results([{"tokens": 12}] * len(outputs), outputs)


register(app, "vectors", Vectors)
