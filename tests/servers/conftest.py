"""Tests of the transport's scripts and leases, in the process that runs the tests."""

import threading
from collections.abc import Iterator

import pytest

from support.harness import wait_for


@pytest.fixture(scope="module", autouse=True)
def _heartbeats_end() -> Iterator[None]:
    """Nothing is sent to Redis any more when a unit test comes next, which may not connect."""
    yield

    def names() -> set[str]:
        return {each.name for each in threading.enumerate()}

    wait_for(lambda: "batchery-heartbeat" not in names(), "the heartbeats end")
