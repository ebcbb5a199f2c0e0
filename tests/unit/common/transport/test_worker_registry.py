"""Which Redis is fit for leases, and what workers register."""

import json
from importlib.metadata import version
from typing import Any

import pytest
import redis

from batchery.errors import RedisUnavailable
from batchery.transport.redis_schema import Keys
from batchery.transport.worker_registry import (
    Registration,
    require_supported,
    server_info,
    warn_of_eviction,
)


@pytest.mark.parametrize("version", ["6.2.0", "6.10", "7.0.1", "10.0"])
def test_redis_that_can_hold_leases_is_accepted(version: str) -> None:
    require_supported({"redis_version": version, "redis_mode": "standalone"})


@pytest.mark.parametrize("version", ["6.1.9", "5.9", "6.0"])
def test_redis_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(RedisUnavailable, match=r"6\.2 or newer"):
        require_supported({"redis_version": version})


def test_cluster_is_refused_and_a_server_that_says_nothing_is_not() -> None:
    with pytest.raises(RedisUnavailable, match="Cluster"):
        require_supported({"redis_mode": "cluster"})
    with pytest.raises(RedisUnavailable, match="Cluster"):
        require_supported({"server_mode": "cluster"})
    require_supported({})


@pytest.mark.parametrize(
    ("policy", "warns"), [("noeviction", False), ("", False), (None, False), ("allkeys-lru", True)]
)
def test_redis_that_evicts_keys_may_lose_jobs(
    policy: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_eviction({} if policy is None else {"maxmemory_policy": policy})
    assert ("evicts keys" in caplog.text) == warns


def test_user_that_may_not_see_the_server_can_hold_leases() -> None:
    class Client:
        def info(self, section: str) -> Any:
            raise redis.ResponseError("NOPERM")

    assert server_info(Client(), "server") == {}


def test_worker_registers_what_is_known_of_it() -> None:
    nothing: Any = None
    registration = Registration(nothing, Keys(), nothing, 5.0)
    assert registration.is_mine
    about = json.loads(registration.info())
    assert about["expiry_s"] == 5.0
    assert about["version"] == version("batchery")
    assert not {"queues", "name"} & set(about)
    about = json.loads(registration.info(queues=["q"], name="w1@host"))
    assert (about["queues"], about["name"]) == (["q"], "w1@host")
