"""What Redis is told of batches that run, so that a death can be blamed on their jobs."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import redis

from batchery.transport import suspects
from batchery.transport.leases import Deaths
from batchery.transport.redis_schema import Keys
from batchery.transport.suspects import (
    FETCHED,
    MAX_COMPLETED_PER_SCRIPT,
    AckBookkeeping,
    RunningBatches,
    build_suspect_field,
    encode_id,
    read_deaths,
)

KEYS = Keys("shop-")
RUNNING = KEYS.running("w1")


class Connection:
    """A connection to Redis, which keeps what is sent over it."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        #: What waits to be read: answers, and errors to raise.
        self.answers: list[Any] = []
        self.is_broken = False

    def send_packed_command(self, commands: Any, check_health: bool) -> None:
        if self.is_broken:
            raise redis.ConnectionError("broken")
        self.sent += commands[0]

    def can_read(self, timeout: float) -> bool:
        if self.is_broken:
            raise redis.ConnectionError("broken")
        return bool(self.answers)

    def read_response(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def disconnect(self) -> None:
        """Is told to a connection that is given back."""


class Pool:
    """Connections to Redis, one after the other."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.released: list[Connection] = []
        self.is_away = False

    def get_connection(self) -> Connection:
        if self.is_away:
            raise redis.ConnectionError("away")
        self.connections.append(Connection())
        return self.connections[-1]

    def release(self, connection: Connection) -> None:
        self.released.append(connection)

    @property
    def sent(self) -> list[tuple[Any, ...]]:
        """All commands, but for those that only set a time."""
        sent = [each for made in self.connections for each in made.sent]
        return [each for each in sent if each[0] != "EXPIRE"]


class Scene:
    """The notes of a worker, and the Redis that gets them."""

    def __init__(self) -> None:
        self.pool = Pool()
        client: Any = self
        self.notes = RunningBatches(client, KEYS)

    @property
    def connection_pool(self) -> Pool:
        return self.pool

    def begin(self, *tokens: str, alone: bool = False, cleared: Sequence[str] = ()) -> int:
        jobs = {token: f"id-{token}" for token in tokens}
        return self.notes.began("w1", jobs, alone=alone, cleared=cleared)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(suspects, "packed", lambda *commands: commands)
    return Scene()


def test_note_names_the_jobs_of_a_batch_and_whether_they_run_alone(scene: Scene) -> None:
    batches = [scene.begin("1", "2"), scene.begin("3", alone=True)]
    assert scene.pool.sent == [
        ("HSET", RUNNING, batches[0], "shared 1 id-1 2 id-2"),
        ("HSET", RUNNING, batches[1], "alone 3 id-3"),
    ]
    assert len(scene.pool.connections) == 1


def test_notes_that_nobody_removes_expire_long_after_any_batch(scene: Scene) -> None:
    scene.begin("1")
    (expire,) = [each for each in scene.pool.connections[0].sent if each[0] == "EXPIRE"]
    assert expire[1] == RUNNING
    assert isinstance(expire[2], int)
    assert expire[2] >= 12 * 3600


def test_notes_of_batches_that_ended_go_with_the_next_one(scene: Scene) -> None:
    first, second = scene.begin("1"), scene.begin("2")
    scene.notes.ended(first)
    scene.notes.ended(second)
    assert not scene.notes.are_some
    third = scene.begin("3")
    assert scene.notes.are_some
    assert scene.pool.sent[2:] == [
        ("HDEL", RUNNING, first, second),
        ("HSET", RUNNING, third, "shared 3 id-3"),
    ]
    fourth = scene.begin("4")
    assert scene.pool.sent[4:] == [("HSET", RUNNING, fourth, "shared 4 id-4")]


def test_redis_knows_of_cleared_suspects_before_a_batch_can_kill_the_worker(scene: Scene) -> None:
    batch = scene.begin("1", cleared=["a", "b"])
    assert scene.pool.sent == [
        ("HDEL", KEYS.suspects, "a", "b"),
        ("HSET", RUNNING, batch, "shared 1 id-1"),
    ]


def test_batch_of_the_message_that_a_fetch_has_noted_needs_no_note(scene: Scene) -> None:
    scene.notes.fetched("7")
    assert scene.begin("7") == FETCHED
    assert scene.notes.are_some
    assert scene.pool.sent == []
    scene.notes.ended(FETCHED)
    assert not scene.notes.are_some
    # The next one removes the note of the fetch.
    batch = scene.begin("8")
    assert scene.pool.sent == [
        ("HDEL", RUNNING, FETCHED),
        ("HSET", RUNNING, batch, "shared 8 id-8"),
    ]


@pytest.mark.parametrize(
    ("tokens", "options"),
    [(["8"], {}), (["7", "8"], {}), (["7"], {"alone": True}), (["7"], {"cleared": ["a"]})],
)
def test_any_other_batch_removes_the_note_of_a_fetch(
    scene: Scene, tokens: list[str], options: dict[str, Any]
) -> None:
    scene.notes.fetched("7")
    assert scene.begin(*tokens, **options) != FETCHED
    assert ("HDEL", RUNNING, FETCHED) in scene.pool.sent
    # Once: the note is gone.
    scene.begin("9")
    assert scene.pool.sent.count(("HDEL", RUNNING, FETCHED)) == 1


def test_note_of_a_fetch_whose_batch_runs_is_kept_when_another_fetch_is_forgotten(
    scene: Scene,
) -> None:
    scene.notes.fetched("7")
    scene.begin("7")
    scene.notes.forget_fetched()
    scene.begin("8")
    assert ("HDEL", RUNNING, FETCHED) not in scene.pool.sent


def test_fetch_has_removed_all_notes_that_were_there(scene: Scene) -> None:
    scene.notes.ended(scene.begin("1"))
    scene.notes.fetched("2")
    scene.notes.ended(scene.begin("2"))
    scene.begin("3")
    assert [command for command in scene.pool.sent if command[0] == "HDEL"] == [
        ("HDEL", RUNNING, FETCHED)
    ]


def test_notes_wait_while_redis_is_away_and_count_as_running(scene: Scene) -> None:
    scene.pool.is_away = True
    scene.notes.ended(scene.begin("1"))
    assert scene.notes.are_some
    scene.pool.is_away = False
    scene.begin("2")
    assert [command[3] for command in scene.pool.sent if command[0] == "HSET"] == [
        "shared 1 id-1",
        "shared 2 id-2",
    ]


def test_note_that_could_not_be_sent_goes_over_a_new_connection(scene: Scene) -> None:
    scene.begin("1")
    (broken,) = scene.pool.connections
    broken.is_broken = True
    scene.begin("2")
    assert scene.pool.released == [broken]
    assert [command[3] for command in scene.pool.connections[1].sent if command[0] == "HSET"] == [
        "shared 2 id-2"
    ]


def test_connection_is_looked_at_when_a_batch_ends_so_that_the_next_need_not_wait(
    scene: Scene,
) -> None:
    batches = [scene.begin("1"), scene.begin("2")]
    (connection,) = scene.pool.connections
    connection.answers = [1, redis.ResponseError("OOM"), 1]
    scene.notes.ended(batches[0])
    assert connection.answers == []
    assert scene.pool.released == []
    connection.answers = [redis.ReadOnlyError("a replica")]
    scene.notes.ended(batches[1])
    assert scene.pool.released == [connection]
    # Nothing is left to look at, and nothing fails.
    scene.notes.ended(batches[1])


def test_fenced_worker_forgets_its_notes(scene: Scene) -> None:
    scene.pool.is_away = True
    scene.notes.ended(scene.begin("1"))
    scene.notes.fetched("2")
    scene.notes.drop()
    assert not scene.notes.are_some
    scene.pool.is_away = False
    scene.begin("2")
    assert [command[0] for command in scene.pool.sent] == ["HSET"]


# What goes with acknowledgements


class Pipe:
    """A pipeline that may fail."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []

    def hdel(self, *args: Any) -> None:
        self.sent.append(args)


class Scripts:
    """Runs nothing, and fails from some call on."""

    def __init__(self, calls: int = 99) -> None:
        self.calls = calls
        self.ran: list[tuple[Any, ...]] = []

    def run(self, name: str, keys: Sequence[str], *args: Any) -> None:
        if len(self.ran) == self.calls:
            raise redis.ConnectionError("away")
        self.ran.append((name, list(keys), list(args)))


def test_cleared_suspects_are_sent_once_and_again_if_that_failed() -> None:
    book, pipe = AckBookkeeping(KEYS), Pipe()
    assert not book
    book.cleared("a")
    assert book
    with suppress(OSError), book.sent_by(pipe):
        raise OSError("away")
    assert book
    with book.sent_by(pipe):
        assert pipe.sent == [(KEYS.suspects, "a", "delivery:a")] * 2
    assert not book
    with book.sent_by(pipe):
        pass
    assert len(pipe.sent) == 2


def test_acknowledgements_with_dedupe_keys_wait_until_redis_has_them() -> None:
    book, count = AckBookkeeping(KEYS), MAX_COMPLETED_PER_SCRIPT
    for number in range(count + 1):
        book.completed(str(number), f"tag{number}")
    scripts: Any = Scripts(calls=1)
    with pytest.raises(redis.ConnectionError):
        book.send_completed(scripts, "lease")
    assert book
    scripts.calls = 99
    book.send_completed(scripts, "lease")
    assert not book
    assert [args for _, _, args in scripts.ran] == [list(map(str, range(count))), [str(count)]]
    assert scripts.ran[1][1] == ["lease", KEYS.dedupe_keys(f"tag{count}")]


def test_dead_letters_wait_until_redis_has_them() -> None:
    book = AckBookkeeping(KEYS)
    book.dead_lettered("1", {"reason": "x"})
    book.dead_lettered("2", {"reason": "y"})
    scripts: Any = Scripts(calls=1)
    with pytest.raises(redis.ConnectionError):
        book.send_dead_letters(scripts, "lease")
    assert book
    scripts.calls = 99
    book.send_dead_letters(scripts, "lease")
    assert not book
    assert [args for _, _, args in scripts.ran] == [
        ["1", '{"reason": "x"}'],
        ["2", '{"reason": "y"}'],
    ]


def test_fenced_worker_sends_no_bookkeeping() -> None:
    book = AckBookkeeping(KEYS)
    book.cleared("a")
    book.completed("1", "t")
    book.dead_lettered("2", {})
    book.drop()
    assert not book


# Fields


def test_group_of_suspects_is_kept_as_a_number_below_zero() -> None:
    assert read_deaths(b"2") == Deaths(2, 0)
    assert read_deaths(b"-7") == Deaths(0, 7)
    assert read_deaths(b"0") == Deaths(0, 0)


@pytest.mark.parametrize("task_id", ["5f3b-9.x_y", "two words", "a:b", "\ud800", "é"])
def test_every_task_id_is_one_word_and_no_two_are_alike(task_id: str) -> None:
    word = encode_id(task_id)
    assert (word == task_id) == (task_id == "5f3b-9.x_y")
    assert not set(word) & {" ", ":"}
    assert word.isascii()


def test_field_of_a_message_that_is_malformed_is_no_field() -> None:
    assert build_suspect_field({"headers": {"id": "a b"}}) == "a%20b"
    assert build_suspect_field({"headers": [1]}) == ""
    assert build_suspect_field({}) == ""
