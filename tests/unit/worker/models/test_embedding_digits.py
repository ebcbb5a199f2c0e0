"""Numbers of vectors: the fewest digits, and all of a float32."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kombu.utils import json as celery_json

from batchery.results import to_numpy
from batchery_worker.device.reply import format_result
from batchery_worker.models.sentence_model import encode_results
from support.tiny_models import Build, Load, run

#: Digits that every float32 survives; many need fewer.
DIGITS = 9

#: Rows of a matrix of any numbers that a vector may have.
ROWS = arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 30)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@given(rows=ROWS)
def test_every_float32_comes_back_to_the_last_bit_whoever_reads_it(rows: Any) -> None:
    results = encode_results([{"tokens": number} for number in range(len(rows))], vector=rows)
    for read in (json.loads, celery_json.loads):
        found = [read(each.json) for each in results]
        assert [each["tokens"] for each in found] == [*range(len(rows))]
        numbers = [each["vector"] for each in found]
        assert {type(number) for row in numbers for number in row} == {float}
        assert np.array(numbers, np.float32).tobytes() == rows.tobytes()
    assert numbers == [each.value["vector"] for each in results]


@given(value=st.floats(2**-20, 2**20, width=32) | st.floats(-(2**20), -(2**-20), width=32))
def test_no_number_has_more_than_nine_digits(value: float) -> None:
    (result,) = encode_results([{}], number=np.array([[value]], np.float32))
    written = repr(result.value["number"][0])
    digits = written.partition("e")[0].replace("-", "").replace(".", "").strip("0")
    assert len(digits) <= DIGITS


@pytest.mark.parametrize("keywords", [{}, {"dimensions": 7}, {"encoding": "base64"}])
def test_encoded_results_are_the_plain_ones(
    keywords: dict[str, Any], build: Build, embedder: Load, texts: list[str]
) -> None:
    model = embedder(build("bert"))
    plain = run(model, texts, **keywords)
    model.give_json()
    encoded = run(model, texts, **keywords)
    assert [each.value for each in encoded] == plain
    assert [json.loads(each.json) for each in encoded] == plain
    assert len(to_numpy(plain[0])) == keywords.get("dimensions", 32)
    # As Celery's log and events show it.
    assert format_result(encoded[0], 128) == format_result(plain[0], 128)
