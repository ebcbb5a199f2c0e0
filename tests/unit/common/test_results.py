"""Typed results and numpy arrays from them."""

import base64
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from batchery.results import (
    Classification,
    Embedding,
    MultiVectorEmbedding,
    Score,
    SparseEmbedding,
    to_numpy,
)

floats = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1)


def packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


@given(floats)
def test_both_encodings_give_the_same_array_bit_for_bit(vector: list[float]) -> None:
    from_list, from_text = to_numpy(vector), to_numpy(packed(vector))
    assert from_list.dtype == from_text.dtype == np.float32
    assert from_list.tobytes() == from_text.tobytes()


@pytest.mark.parametrize("encode", [list, packed])
def test_arrays_come_from_results_and_vectors_alike_and_can_be_written_to(encode: Any) -> None:
    result = {"tokens": 2, "vector": encode([0.5, -1.0])}
    for array in (to_numpy(result), to_numpy(result["vector"]), Embedding(**result).to_numpy()):
        np.testing.assert_array_equal(array, [0.5, -1.0])
        array[0] = 0


@pytest.mark.parametrize("wrong", ["no base64!", "YWJj", [[1.0], [2.0]], ["a"]])
def test_anything_but_a_vector_raises_value_error(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        to_numpy(wrong)


def test_a_result_without_vector_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        to_numpy({"tokens": 1, "label": "yes"})


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (Embedding, {"tokens": 3, "vector": [0.25, 0.5]}),
        (Embedding, {"tokens": 3, "vector": packed([0.25, 0.5])}),
        (Classification, {"tokens": 3, "label": "yes", "score": 0.75}),
        (
            Classification,
            {"tokens": 3, "label": "yes", "score": 0.75, "scores": {"yes": 0.75, "no": 0.25}},
        ),
        (Score, {"tokens": 3, "truncated": True, "score": -1.5}),
        (SparseEmbedding, {"tokens": 3, "indices": [4, 9], "values": [0.5, 0.25]}),
        (MultiVectorEmbedding, {"tokens": 2, "vectors": [[0.5, 1.0], [0.25, 0.0]]}),
        (
            MultiVectorEmbedding,
            {"tokens": 2, "vectors": packed([0.5, 1.0, 0.25, 0.0]), "dimensions": 2},
        ),
    ],
)
def test_results_survive_json(kind: type[Any], result: dict[str, Any]) -> None:
    parsed = kind.model_validate_json(json.dumps(result))
    assert parsed.model_dump(exclude_unset=True) == result


@pytest.mark.parametrize("encode", [np.ndarray.tolist, lambda rows: packed(rows.ravel().tolist())])
def test_vectors_of_tokens_are_a_matrix_in_both_encodings(encode: Any) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    result = MultiVectorEmbedding(tokens=3, vectors=encode(rows), dimensions=2)
    np.testing.assert_array_equal(result.to_numpy(), rows)


@pytest.mark.parametrize(
    "result",
    [
        {"tokens": -1, "vector": [1.0]},
        {"tokens": 1},
        {"tokens": 1, "vector": [1.0], "label": "yes"},
    ],
)
def test_malformed_embedding_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Embedding.model_validate(result)
