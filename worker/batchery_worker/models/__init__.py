"""The built-in kinds of model. Only this package and `device.py` import torch."""

from batchery_worker.models.classification import ClassificationModel
from batchery_worker.models.embedding import EmbeddingModel

__all__ = ["ClassificationModel", "EmbeddingModel"]
