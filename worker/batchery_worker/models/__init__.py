"""The built-in kinds of model. Only this package and `device.py` import torch.

Each kind loads its module when it is first used: transformers takes seconds, and whoever needs only
copies to a device needs none of it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchery_worker.models.classification import ClassificationModel
    from batchery_worker.models.embedding import EmbeddingModel
    from batchery_worker.models.multi_vector_embedding import MultiVectorEmbeddingModel
    from batchery_worker.models.rerank import RerankModel
    from batchery_worker.models.sparse_embedding import SparseEmbeddingModel
    from batchery_worker.models.token_classification import TokenClassificationModel
    from batchery_worker.models.zero_shot import ZeroShotModel

__all__ = [
    "ClassificationModel",
    "EmbeddingModel",
    "MultiVectorEmbeddingModel",
    "RerankModel",
    "SparseEmbeddingModel",
    "TokenClassificationModel",
    "ZeroShotModel",
]

#: Name -> the module that it comes from.
_MODULES = {
    "ClassificationModel": "batchery_worker.models.classification",
    "EmbeddingModel": "batchery_worker.models.embedding",
    "MultiVectorEmbeddingModel": "batchery_worker.models.multi_vector_embedding",
    "RerankModel": "batchery_worker.models.rerank",
    "SparseEmbeddingModel": "batchery_worker.models.sparse_embedding",
    "TokenClassificationModel": "batchery_worker.models.token_classification",
    "ZeroShotModel": "batchery_worker.models.zero_shot",
}


def __getattr__(name: str) -> Any:
    if (module := _MODULES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value
