"""What tests of the in-process batcher share."""

from collections.abc import Iterator

import pytest

from support.gate import Gate


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()
