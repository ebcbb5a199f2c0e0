"""Messages that anybody can push: none ends a worker, holds up a good one, or stays in a worker."""

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from apps import hybrid
from batchery import InvalidItem
from batchery.transport.dead_letters import MAX_MESSAGE_BYTES
from conftest import StartWorker
from support.harness import Worker, open_redis, unsettled, wait_for
from support.patience import patient

TIMEOUT_S = patient(120)

#: How many values the fuzzer tries in each place of a message, and how many before a good one, and
#: how many messages that makes at least.
VALUES, VALUES_AT_ONCE, MESSAGES = 108, 27, 5_000

#: Name, queue and arguments of a batch task.
TASK, QUEUE, ARGUMENTS = "apps.hybrid.double", "devices", [4]

#: Headers that a worker may read, besides those that Celery always sends.
MORE_HEADERS = (
    *("batchery", "batchery_tenant", "traceparent", "compression", "chord", "redelivered"),
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["2026-01-01T00:00:00", "1e400", "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.hybrid", "-c", "1", "-Q", "celery,devices", "-E")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    hybrid.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def decode_message(client: Celery, redis_url: str) -> dict[str, Any]:
    """A message of the task, with its body decoded."""
    client.send_task(TASK, ARGUMENTS, queue="aside")
    with open_redis(redis_url) as redis:
        found: Any = redis.rpop("aside")
    read: dict[str, Any] = json.loads(found)
    return {**read, "body": json.loads(base64.b64decode(read["body"]))}


def put(redis_url: str, messages: Sequence[dict[str, Any]]) -> None:
    """Puts messages on the queue of the task, each with an id of its own."""
    for each in messages:
        if isinstance(body := each.get("body"), list):
            each["body"] = base64.b64encode(json.dumps(body).encode()).decode()
    with open_redis(redis_url) as redis:
        redis.lpush(QUEUE, *map(json.dumps, messages))


def check_well(worker: Worker, redis_url: str) -> None:
    """Makes sure that good jobs run behind all that was sent, and that nothing of it is left."""
    batch, ordinary = hybrid.double.delay(4), hybrid.add.delay(1, 2)
    assert batch.get(timeout=TIMEOUT_S) == 8, worker.log
    assert ordinary.get(timeout=TIMEOUT_S) == 3, worker.log
    wait_for(lambda: unsettled(redis_url) == 0, "every message has ended", TIMEOUT_S)
    assert worker.process.poll() is None
    for kept in ("reserved", "scheduled"):
        wait_for(lambda: worker.inspect(hybrid.app, kept) == [], f"nothing is {kept}")  # noqa: B023


@pytest.mark.parametrize("follows", ["callbacks", "errbacks", "chain"])
@pytest.mark.parametrize("queue", ["batchery:workers", "unacked", "gone"])
def test_a_callback_to_a_key_that_is_no_queue_is_not_sent(
    client: Celery, redis_url: str, worker: Worker, queue: str, follows: str
) -> None:
    """However often its retry policy would have it tried, and however long it would pause."""
    policy = {"max_retries": None, "interval_start": 1000, "interval_max": 1000}
    callback = client.signature(
        "apps.hybrid.add", (1, 2), immutable=True, options={"queue": queue, "retry_policy": policy}
    )
    message = decode_message(client, redis_url)
    message["body"][2][follows] = [dict(callback)]
    if follows == "errbacks":
        message["body"][0] = ["no number"]
    # From now on the device is among the holders of leases, whose key is one of these.
    check_well(worker, redis_url)
    with open_redis(redis_url) as redis:
        redis.hset("gone", "a", "b")
        before = redis.type(queue)
        put(redis_url, [message])
        check_well(worker, redis_url)
        assert redis.type(queue) == before


def test_a_message_that_grows_too_large_is_decompressed_no_further(
    client: Celery, redis_url: str, worker: Worker
) -> None:
    message = decode_message(client, redis_url)
    bomb = zlib.compress(b"x" * (MAX_MESSAGE_BYTES + 1), level=9)
    message["body"] = base64.b64encode(bomb).decode()
    message["headers"]["compression"] = "application/x-gzip"
    put(redis_url, [message])
    check_well(worker, redis_url)
    with pytest.raises(InvalidItem, match="and the maximum is 134,217,728"):
        client.AsyncResult(message["headers"]["id"]).get(timeout=TIMEOUT_S)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """All places in a message, but for the message itself."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from paths_in(each, (*path, name))
    if path == ("headers",):
        yield from ((*path, name) for name in MORE_HEADERS)


def with_value(message: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A message with an id of its own, and another value in one place."""
    made = deepcopy(message)
    made["headers"]["id"] = made["properties"]["correlation_id"] = str(uuid4())
    target: Any = made
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    return made


@pytest.mark.timeout(600)
def test_mutated_messages_end_no_worker_and_hold_up_no_good_one(
    client: Celery, redis_url: str, worker: Worker
) -> None:
    message = decode_message(client, redis_url)
    paths = list(paths_in(message))
    assert len(paths) * VALUES >= MESSAGES

    @settings(
        max_examples=VALUES // VALUES_AT_ONCE,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(JSON, min_size=VALUES_AT_ONCE, max_size=VALUES_AT_ONCE))
    def check(values: Sequence[Any]) -> None:
        made = [with_value(message, path, value) for path in paths for value in values]
        put(redis_url, made)
        check_well(worker, redis_url)

    check()
