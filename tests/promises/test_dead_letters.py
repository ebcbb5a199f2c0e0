"""`batchery dead`, and what a worker that refuses a message does for those who wait for it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord
from celery.exceptions import ChordError, NotRegistered
from click.testing import CliRunner, Result
from redis import Redis

from apps import killers
from batchery import InvalidItem
from batchery.cli.main import main
from batchery.transport.dead_letters import DeadLetter, DeadLetters
from batchery.transport.redis_schema import find_tenant_list
from conftest import StartWorker
from support.commands import start
from support.harness import SEP, Worker, open_redis, wait_for
from support.patience import TIMEOUT_S

#: The queue of a batch task.
QUEUE = "apps.killers.obey"

#: A body that is no job: null.
NULL = "bnVsbA=="


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker) -> Worker:
    return start_module_worker("apps.killers")


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    killers.app.conf.update(broker_url=redis_url, result_backend=redis_url)


@pytest.fixture
def redis(redis_url: str) -> Iterator["Redis"]:
    with open_redis(redis_url) as client:
        yield client
        client.delete("batchery:dead", "batchery:dead-messages")


def aside(redis: "Redis") -> dict[str, Any]:
    """The message that was put aside."""
    found: Any = redis.rpop("aside")
    message: dict[str, Any] = json.loads(found)
    return message


def decode_message(redis: "Redis", name: str = "apps.killers.obey") -> dict[str, Any]:
    keywords = {"folder": "."}
    killers.app.send_task(name, ["hello"], keywords, queue="aside")
    return aside(redis)


def refused(redis: "Redis", message: Any, key: str = QUEUE) -> DeadLetter:
    """Gives the worker a message in a list; the dead letter that becomes of it."""
    redis.lpush(key, message if isinstance(message, bytes) else json.dumps(message))
    letters = DeadLetters(redis)
    wait_for(lambda: len(letters), "a dead letter")
    (letter,) = letters
    return letter


def dead(*arguments: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(main, ["dead", *arguments, "-A", "apps.killers"], input=answer)


@pytest.mark.parametrize(
    ("spoiled", "says"),
    [
        ({"body": NULL}, "the body is not a list of arguments"),
        ({"body": "###"}, "the message is malformed"),
        ({"properties": {}}, "DecodeError"),
        ({"properties": None}, "the message cannot be understood"),
        ({"content-type": "application/x-python-serialize"}, "ContentDisallowed"),
    ],
)
def test_a_message_that_cannot_be_read_is_kept_and_its_caller_hears_of_it(
    worker: Worker, redis: "Redis", spoiled: dict[str, Any], says: str
) -> None:
    message = decode_message(redis)
    letter = refused(redis, {**message, **spoiled})
    assert says in letter.reason
    assert (letter.id, letter.task) == (message["headers"]["id"], "apps.killers.obey")
    assert letter.queue == QUEUE
    with pytest.raises(InvalidItem) as error:
        killers.app.AsyncResult(message["headers"]["id"]).get(timeout=TIMEOUT_S)
    assert str(error.value) == letter.reason
    assert redis.hgetall("batchery:lease") == {}


def test_dead_letter_and_its_job_name_each_other(worker: Worker, redis: "Redis") -> None:
    message = decode_message(redis, "nobody.knows.me")
    letter = refused(redis, message)
    task_id = message["headers"]["id"]
    shown = dead("show", task_id)
    assert shown.exit_code == 0
    assert f"token:   {letter.token}" in shown.output
    with pytest.raises(NotRegistered):
        killers.app.AsyncResult(task_id).get(timeout=TIMEOUT_S)
    for state, code in (("FAILURE", 1), ("UNKNOWN", 4)):
        explained = CliRunner().invoke(main, ["explain", task_id, "-A", "apps.killers"])
        assert explained.exit_code == code
        assert explained.output.startswith(f"{state}: ")
        assert f"see `batchery dead show {letter.token}`" in explained.output
        redis.delete(f"celery-task-meta-{task_id}")


@pytest.mark.parametrize(
    "spoiled",
    [
        {"headers": {"task": "nobody.knows.me.either", "id": "1"}},
        {"headers": {"task": "apps.killers.obey", "id": 7}},
        {"body": "###"},
        {"headers": {}},
    ],
)
def test_message_that_is_kept_has_one_line_of_the_log(
    worker: Worker, redis: "Redis", spoiled: dict[str, Any]
) -> None:
    # A worker with ordinary tasks does not wait for its devices.
    wait_for(lambda: " is ready, pid " in worker.log, "the device is ready")
    # Lines of earlier tests may come late, but before this one's.
    first = killers.count.delay([])
    wait_for(lambda: f"[{first.id}] succeeded" in worker.log, "the log of a job")
    before = len(worker.log)
    letter = refused(redis, {**decode_message(redis), **spoiled})
    wait_for(lambda: f"see `batchery dead show {letter.token}`" in worker.log, "a line of the log")
    killers.count.delay([]).get(timeout=TIMEOUT_S)
    lines = [line for line in worker.log[before:].splitlines() if "count" not in line]
    assert len(lines) == 1, lines


@pytest.mark.parametrize("text", [b"\xff\xfe no text", b"[" * 200_000, b'{"hello": 1}', b"7"])
def test_value_that_is_no_message_becomes_a_dead_letter(
    worker: Worker, redis: "Redis", text: bytes
) -> None:
    letter = refused(redis, text)
    assert (letter.id, letter.task) == (None, None)
    found = DeadLetters(redis).get(letter.token)
    assert found is not None
    assert found[1] == text


@pytest.mark.parametrize("spoiled", [{"properties": {}}, {"headers": {"eta": "soon"}}])
def test_a_chord_hears_of_a_part_that_is_a_dead_letter(
    worker: Worker, redis: "Redis", tmp_path: Path, spoiled: dict[str, Any]
) -> None:
    parts = [killers.obey.s(text, folder=str(tmp_path)) for text in "ab"]
    parts[1].set(queue="aside")
    result = chord(parts, app=killers.app)(killers.count.s())
    message = aside(redis)
    headers = {**message["headers"], **spoiled.get("headers", {})}
    refused(redis, {**message, **spoiled, "headers": headers})
    wait_for(result.ready, "the chord is over", TIMEOUT_S)
    assert isinstance(result.result, ChordError)
    assert "InvalidItem" in str(result.result)


def test_the_commands_list_show_requeue_and_purge(
    worker: Worker, redis: "Redis", tmp_path: Path
) -> None:
    assert dead("list").output == "no dead letters\n"
    assert dead("list", "--json").output == ""
    message = decode_message(redis)
    # Of a tenant, whose list is not told.
    letter = refused(redis, {**message, "body": NULL}, find_tenant_list(QUEUE, SEP, "acme"))
    listed = dead("list")
    assert listed.exit_code == 0
    row = next(line for line in listed.output.splitlines() if letter.token in line)
    assert "apps.killers.obey" in row
    assert message["headers"]["id"] in row
    assert json.loads(dead("list", "--json").output) == {
        "token": letter.token,
        "reason": letter.reason,
        "died_s": letter.died_s,
        "id": letter.id,
        "task": letter.task,
        "queue": QUEUE,
    }
    shown = dead("show", letter.token).output
    assert "args:    ['hello']" in shown
    assert f"reason:  {letter.reason}" in shown
    assert f'"body": "{NULL}"' in shown
    report = json.loads(dead("show", letter.token, "--json").output)
    assert report["headers"]["id"] == letter.id
    assert json.loads(report["message"])["body"] == NULL
    assert json.loads(dead("show", letter.token, "--raw").output)["body"] == NULL
    assert len(DeadLetters(redis)) == 1
    # As broken as before: it comes back, under another token.
    assert dead("requeue", letter.token).output == "requeued: 1\n"
    wait_for(lambda: set(DeadLetters(redis).tokens()) - {letter.token}, "it is back")
    kept = dead("purge", "--all", answer="n\n")
    assert kept.exit_code == 1
    assert "Delete 1 dead letter for good?" in kept.output
    assert len(DeadLetters(redis)) == 1
    assert dead("purge", "--all", "--yes").output == "deleted: 1\n"
    assert dead("purge", "--all", "--yes").output == "deleted: 0\n"
    assert dead("requeue", "--all").output == "requeued: 0\n"


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("show", "99"), 1, "no dead letter 99"),
        (("requeue", "98", "99"), 1, "no dead letter 98, 99"),
        (("purge", "99", "--yes"), 1, "no dead letter 99"),
        (("requeue",), 2, "give either TOKENs or --all"),
        (("purge", "1", "--all"), 2, "give either TOKENs or --all"),
        (("list", "--redis", "redis://127.0.0.1:1/0"), 2, "--redis is for the default app"),
    ],
)
def test_impossible_command_says_why_and_exits_with_its_code(
    command: tuple[str, ...], code: int, says: str
) -> None:
    result = dead(*command)
    assert result.exit_code == code
    assert says in result.output


def test_a_broker_that_is_no_redis_is_refused() -> None:
    killers.app.conf.update(broker_url="memory://")
    result = dead("list")
    assert result.exit_code == 2
    assert "dead letters are kept in Redis, but the broker is memory://" in result.output


def test_a_reader_of_the_list_that_ends_says_nothing_of_the_broker(
    redis: "Redis", redis_url: str
) -> None:
    redis.hset("batchery:dead", "5", "celery\0{}")
    command = ("batchery", "dead", "list", "--json", "-A", "apps.killers")
    with start(redis_url, *command) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr.read() == ""


def test_letters_from_strangers_cannot_move_the_cursor(redis: "Redis") -> None:
    evil = {"reason": "\x1b[2J[red]", "died_s": 0.0, "id": None, "task": "x\ny"}
    redis.hset("batchery:dead", "5", f"celery\0{json.dumps(evil)}")
    redis.hset("batchery:dead-messages", "5", "celery\0\x1b[2J")
    for output in (dead("list").output, dead("show", "5").output):
        assert "\x1b" not in output
        assert "\\x1b[2J[red]" in output
