"""Numbers of vectors: the fewest digits, and all of a float32."""

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kombu.utils import json as celery_json

from batchery import to_numpy
from batchery_producer.answers import unpack_list
from batchery_worker.models.text_items import encode_results
from batchery_worker.plain_values import Encoded, Vector

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


@given(rows=ROWS)
def test_a_vector_is_the_same_in_base64_as_a_list_and_from_a_cache(rows: Any) -> None:
    for row in rows:
        made = Encoded(b'{"tokens":1,"vector":', Vector(row), b"}")
        for each in (made, Encoded.load(made.dump())):
            listed, packed = json.loads(each.json), json.loads(each.packed)
            assert listed == each.value
            assert to_numpy(listed).tobytes() == to_numpy(packed).tobytes() == row.tobytes()
            assert unpack_list(packed["vector"]) == row.tolist()


@given(value=st.floats(2**-20, 2**20, width=32) | st.floats(-(2**20), -(2**-20), width=32))
def test_no_number_has_more_than_nine_digits(value: float) -> None:
    (result,) = encode_results([{}], number=np.array([[value]], np.float32))
    written = repr(result.value["number"][0])
    digits = written.partition("e")[0].replace("-", "").replace(".", "").strip("0")
    assert len(digits) <= DIGITS
