"""A channel that leases, without Redis."""

import pytest

from support.fake_channel import Channel


@pytest.fixture
def channel() -> Channel:
    """A channel that has begun to lease."""
    made = Channel()
    made.lease()
    return made
