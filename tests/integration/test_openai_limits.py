"""The limits per minute of the engine `openai`, which all workers share."""

import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery

from batchery import install
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.model import OpenAIServerModel
from batchery_worker.models.openai_server.rate_limit import make_rate_limit
from conftest import flush
from support.harness import TESTS, open_redis, wait_for
from support.openai_server import (
    Call,
    Cut,
    OpenAIServer,
    cut_after,
    echo,
    pause_after,
    raw,
    status,
)
from support.own_redis import OwnRedis
from support.patience import patient
from support.step_driver import StepDriver


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with OpenAIServer() as made:
        yield made


# Asks for as much as it may, for some seconds.
ASK = """
import sys, time
from celery import Celery
from batchery import install
install(Celery("limited", broker=sys.argv[1])).set_default()
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.model import OpenAIServerModel
from support.step_driver import StepDriver
model = OpenAIServerModel(ModelSettings(
    kind="generation", engine="openai", model="tiny", base_url=sys.argv[2],
    **{sys.argv[3]: int(sys.argv[4])},
))
model.load("cpu")
driver = StepDriver(model)
for number in range(100):
    driver.join(f"{sys.argv[5]} {number}", max_new_tokens=int(sys.argv[6]))
while True:
    driver.step()
"""


@pytest.mark.parametrize(
    ("setting", "per_minute", "max_new_tokens", "at_once"),
    [
        # A tenth of a minute's worth may leave at once; the rest comes evenly.
        ("max_requests_per_minute", 200, 5, 20),
        # Estimated at about 130 each, they take 50: the others are given back.
        ("max_tokens_per_minute", 10_000, 100, 20),
    ],
)
def test_limits_hold_for_all_processes_together(
    server: OpenAIServer,
    redis_url: str,
    setting: str,
    per_minute: int,
    max_new_tokens: int,
    at_once: int,
) -> None:
    async def reply(call: Call) -> None:
        await call.head()
        await call.words("a")
        await call.done(tokens_in=30, tokens_out=20)

    names = ("left", "right")
    server.replies = {f"{name} {number}": [reply] for name in names for number in range(100)}
    command = [sys.executable, "-c", textwrap.dedent(ASK), redis_url, server.url, setting]
    processes = [
        subprocess.Popen([*command, str(per_minute), name, str(max_new_tokens)], cwd=TESTS)
        for name in names
    ]
    try:
        wait_for(lambda: len(server.asked) >= at_once + 20, "both ask", patient(60))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    times_s = [asked.at_s for asked in server.asked]
    per_s = 0.9 * 200 / 60
    for first, begin_s in enumerate(times_s):
        for count, end_s in enumerate(times_s[first:], 1):
            # One more, as they take a moment from the bucket to the server.
            assert count <= at_once + per_s * (end_s - begin_s) + 2
    took_s = times_s[-1] - times_s[0]
    assert took_s < patient(3 * 20 / per_s)
    assert set(Counter(asked.prompt.split()[0] for asked in server.asked)) == set(names)


@contextmanager
def loaded(url: str, server: OpenAIServer, **settings: Any) -> Iterator[StepDriver]:
    """Asks for 10,000 tokens a minute at most."""
    app = install(Celery("limited", broker=url, set_as_current=False))
    fields = {"base_url": server.url, "max_tokens_per_minute": 10_000, **settings}
    model = OpenAIServerModel(
        ModelSettings(kind="generation", engine="openai", model="tiny", **fields)
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{make_rate_limit.__module__}.app_or_default", lambda: app)
        model.load("cpu")
    yield StepDriver(model)
    model.unload()


@pytest.fixture
def limited(server: OpenAIServer, redis_url: str) -> Iterator[StepDriver]:
    flush(redis_url)
    with loaded(redis_url, server) as driver:
        yield driver


def full_ms(redis_url: str) -> int:
    """In how long all tokens are there again, and a second more."""
    with open_redis(redis_url) as bare:
        (key,) = bare.keys("*batchery:rate:*")
        return int(bare.pttl(key))


@pytest.mark.parametrize("max_new_tokens", [10**12, 10**30])
def test_job_that_asks_for_more_tokens_than_there_are_holds_up_others_for_a_minute(
    server: OpenAIServer, limited: StepDriver, redis_url: str, max_new_tokens: int
) -> None:
    server.replies["greedy"] = [pause_after("a", 600)]
    slot = limited.join("greedy", max_new_tokens=max_new_tokens)

    def has_begun() -> bool:
        limited.step()
        return bool(limited.pieces[slot])

    wait_for(has_begun, "it has its first piece")
    assert 60_000 < full_ms(redis_url) < 90_000
    # What it did not get comes back.
    limited.model.leave(slot)
    assert limited.run("modest", max_new_tokens=5)["text"] == "MODEST "
    assert full_ms(redis_url) < 5_000


async def hang_up(_: Call) -> None:
    raise Cut


def test_tokens_that_an_attempt_did_not_need_come_back(
    server: OpenAIServer, limited: StepDriver, redis_url: str
) -> None:
    server.replies["is cut"] = [cut_after("IS"), echo]
    server.replies["hangs up"] = [hang_up, echo]
    server.replies["is refused"] = [status(503), echo]
    server.replies["breaks off"] = [raw({"error": "no"}), echo]
    for prompt in server.replies:
        assert limited.run(prompt, max_new_tokens=9_000)["text"] == f"{prompt.upper()} "
        wait_for(lambda: full_ms(redis_url) < 5_000, f"tokens of {prompt!r} are back")
    # Without a count the estimate stays.
    end = {"choices": [{"text": "A", "finish_reason": "stop"}]}
    server.replies["uncounted"] = [raw(end, "[DONE]")]
    limited.run("uncounted", max_new_tokens=9_000)
    assert full_ms(redis_url) > 30_000


def test_clock_of_redis_that_goes_back_holds_up_nobody(
    server: OpenAIServer, limited: StepDriver, redis_url: str
) -> None:
    server.replies["takes all"] = [pause_after("a", 600)]
    limited.join("takes all", max_new_tokens=1_000)
    wait_for(lambda: server.asked, "it has taken them")
    with open_redis(redis_url) as bare:
        (key,) = bare.keys("*batchery:rate:*")
        # Its end is a time of that clock, too.
        bare.hincrby(key, "at", 3_600_000)
        bare.pexpire(key, 3_600_000)
    assert limited.run("modest", max_new_tokens=5)["text"] == "MODEST "


def test_job_waits_for_its_turn_as_long_as_redis_is_away(
    server: OpenAIServer, own_redis: OwnRedis
) -> None:
    with loaded(own_redis.url, server, server_retry_s=0) as driver:
        own_redis.kill()
        slot = driver.join("waits")
        for _ in range(10):
            driver.step()
        assert not driver.outcomes
        assert not server.asked
        own_redis.start()
        (outcome,) = driver.wait(slot)
        assert outcome["text"] == "WAITS "
