"""No decoder raises anything else than it says, hangs, or takes more memory than it was given."""

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.decoders import DECODERS
from fuzz.trial import try_input, watched_memory
from fuzz.values import inputs

#: How many inputs each decoder is given here; `make fuzz` tries for half an hour.
EXAMPLES = 100

CASES = [
    pytest.param(name, data, id=f"{name}-{number}")
    for name, decoder in DECODERS.items()
    for number, data in enumerate(decoder.examples)
]


@pytest.mark.parametrize(("name", "data"), CASES)
def test_a_decoder_takes_its_examples(name: str, data: bytes) -> None:
    with watched_memory(DECODERS[name]):
        try_input(DECODERS[name], data)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_takes_whatever_it_is_given(name: str) -> None:
    decoder = DECODERS[name]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
    @given(inputs(decoder.examples))
    def check(data: bytes) -> None:
        # Of the decoder alone: Hypothesis reads the sources of all modules before its first input,
        # which takes 40 s where memory is counted.
        with watched_memory(decoder):
            try_input(decoder, data)

    check()
