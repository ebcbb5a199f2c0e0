from collections.abc import Iterator
from typing import Any

import pytest
import redis

from own_redis import OwnRedis


@pytest.fixture
def bare(every_redis: OwnRedis) -> Iterator[Any]:
    """A client of an empty Redis."""
    with redis.Redis.from_url(every_redis.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", 0)
