"""Each script by itself, on every redis-server that there is."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from batchery.transport.redis_schema import Keys, transport_scripts
from batchery.transport.suspects import encode_id

KEYS = Keys()
ME = "me"
PLENTY = 2**20
REGISTERS = [KEYS.workers, KEYS.worker_info, KEYS.token, KEYS.schema]


class Redis:
    """The scripts with the arguments that the tests do not care about."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.scripts = transport_scripts(client)
        self.register()

    def register(self, worker: str = ME, last: int = 0) -> None:
        assert self.scripts.run("register", REGISTERS, worker, "{}", last, 1) == 0

    def renew(self, worker: str = ME) -> Any:
        return self.scripts.run("renew", [KEYS.workers, KEYS.worker_info], worker, "{}")

    def fetch(
        self,
        *queues: str,
        wanted: int = 100,
        room: int = PLENTY,
        steps: int = 1,
    ) -> Any:
        """Tokens, keys and messages; None if fenced."""
        fixed = [KEYS.workers, KEYS.lease(ME), KEYS.token, KEYS.suspects, KEYS.waiting]
        fixed += [KEYS.running(ME)]
        tenants = [f"{queue}:t{number}" for queue in queues for number in range(8)]
        count = len(queues) // steps
        # All lists of a queue are one part.
        parts = [1 + at % count for at in range(len(queues))]
        limits = [wanted] * count
        answer = self.scripts.run(
            "fetch",
            [*fixed, *queues, *tenants],
            *[ME, room, "", len(limits), *limits, *parts],
        )
        if not answer:
            return answer
        tokens = range(answer[1], answer[1] + len(answer) // 2 - 1)
        keys = [queues[index] for index in answer[2::2]]
        return list(zip(tokens, keys, [each.decode() for each in answer[3::2]], strict=True))

    def wait_for(self, worker: str, free: int, *queues: str) -> None:
        """Enters another worker as waiting."""
        self.client.hset(KEYS.waiting, worker, json.dumps([free, queues]))

    def give(self, *jobs: tuple[int, str]) -> list[int]:
        """Gives jobs back: token and queue of each."""
        keys = [KEYS.lease(ME), KEYS.waiting]
        told = [each for job in jobs for each in job]
        return sorted(map(int, self.scripts.run("give_to_waiting", keys, ME, *told)))

    def postpone(self, delay_s: float, *tokens: int) -> Any:
        words = [each for token in tokens for each in (token, delay_s)]
        laters = [KEYS.later("a")] * len(tokens)
        return self.scripts.run("postpone", [KEYS.lease(ME), *laters], *words)

    def return_due(self, ahead_s: float = 2.0, maximum: int = 100) -> Any:
        laters = [KEYS.later(queue) for queue in ("a", "b")]
        return self.scripts.run("return_due", laters, ahead_s, maximum)

    def recover(self, worker: str = ME, beat: str = "", counts: int = 0) -> Any:
        return self.scripts.run(
            "recover",
            [
                KEYS.workers,
                KEYS.worker_info,
                KEYS.lease(worker),
                KEYS.running(worker),
                KEYS.suspects,
                KEYS.waiting,
            ],
            *[worker, beat, counts],
        )

    def beat(self) -> str:
        return str(int(self.client.zscore(KEYS.workers, ME)))

    def leases(self) -> dict[str, str]:
        found = self.client.hgetall(KEYS.lease(ME))
        return {token.decode(): value.decode() for token, value in found.items()}

    def queue(self, name: str) -> list[str]:
        """In the order in which they will be taken."""
        return [each.decode() for each in reversed(self.client.lrange(name, 0, -1))]


@pytest.fixture
def there(bare: Any) -> Redis:
    return Redis(bare)


def push(client: Any, queue: str, *messages: str) -> None:
    client.lpush(queue, *messages)


def test_fetch_serves_all_queues_of_a_step_before_the_next(there: Redis) -> None:
    for queue, text in (("a", "1 3"), ("b", "2 4"), ("a:3", "5"), ("b:3", "6")):
        push(there.client, queue, *text.split())
    fetched = there.fetch("a", "b", "a:3", "b:3", steps=2)
    assert [message for _, _, message in fetched] == ["1", "3", "2", "4", "5", "6"]
    assert [token for token, _, _ in fetched] == [1, 2, 3, 4, 5, 6]
    assert there.leases()["6"] == "b:3\x006"
    assert not there.client.exists("a", "b", "a:3", "b:3")


def test_fetch_of_thousands(there: Redis) -> None:
    push(there.client, "a", *[str(number) for number in range(5000)])
    fetched = there.fetch("a", wanted=5000)
    assert [message for _, _, message in fetched] == [str(number) for number in range(5000)]
    assert len(there.leases()) == 5000


def test_fetch_stops_at_its_bytes(there: Redis) -> None:
    push(there.client, "a", *["x" * 1000] * 64)
    assert len(there.fetch("a", room=10_000)) == 16
    assert there.client.llen("a") == 48


def test_a_message_larger_than_the_bytes_is_taken_alone(there: Redis) -> None:
    push(there.client, "a", "x" * 1000)
    push(there.client, "b", "y")
    assert len(there.fetch("a", "b", room=10)) == 1
    assert len(there.fetch("b", room=10)) == 1


def test_unregistered_worker_gets_nothing(there: Redis) -> None:
    push(there.client, "a", "1")
    there.recover()
    assert there.fetch("a") is None
    assert there.renew() is None
    assert there.queue("a") == ["1"]


def test_messages_wait_beside_their_queue_and_return_in_the_order_of_their_times(
    there: Redis,
) -> None:
    push(there.client, "a", "1", "2", "3", "late")
    there.fetch("a")
    push(there.client, "a", "4")
    there.postpone(1.5, 3)
    there.postpone(0.5, 1, 2)
    # One whose lease is gone.
    there.postpone(3600, 4, 99)
    assert there.leases() == {}
    assert there.queue("a") == ["4"]
    there.client.set(KEYS.later("b"), "of another type")
    there.return_due(ahead_s=0)
    assert there.queue("a") == ["4"]
    there.return_due(maximum=2)
    assert there.queue("a") == ["1", "2", "4"]
    there.return_due()
    assert there.queue("a") == ["3", "1", "2", "4"]
    assert there.client.zrange(KEYS.later("a"), 0, -1) == [b"a\0late"]


def test_keys_of_another_type_lose_no_message_that_waits_for_its_time(there: Redis) -> None:
    push(there.client, "a", "1")
    push(there.client, "b", "2", "3")
    there.fetch("a", "b")
    there.client.set(KEYS.later("a"), "of another type")
    there.postpone(0.5, 1)
    assert there.leases() == {"1": "a\x001", "2": "b\x002", "3": "b\x003"}
    there.client.delete(KEYS.later("a"))
    there.postpone(0.5, 1, 2, 3)
    there.client.set("b", "of another type")
    there.client.zadd(KEYS.later("a"), {"no message": 0})
    there.return_due()
    assert there.queue("a") == ["1"]
    waiting = there.client.zrange(KEYS.later("a"), 0, -1)
    assert waiting == [b"b\x002", b"b\x003"]
    there.client.delete("b")
    there.return_due(ahead_s=90.0)
    assert there.queue("b") == ["2", "3"]
    assert not there.client.exists(KEYS.later("a"))


def fill(client: Any) -> None:
    """Leaves Redis no room for anything."""
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", 1)
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("anything", "")


FULL: dict[str, Callable[[Redis], object]] = {
    "fetch": lambda there: there.fetch("a"),
    "fetch that notes": lambda there: there.fetch("a"),
    "renew": lambda there: there.renew(),
    "register": lambda there: not there.scripts.run("register", REGISTERS, "another", "{}", 0, 1),
    "recover": lambda there: there.recover(counts=1),
    "requeue": lambda there: there.scripts.run("requeue", [KEYS.lease(ME)], "RPUSH", 1),
    "give_to_waiting": lambda there: there.give((1, "a")),
    "postpone": lambda there: there.postpone(60.0, 1),
    "return_due": lambda there: there.return_due(),
    "dead_letter": lambda there: there.scripts.run(
        "dead_letter", [KEYS.lease(ME), KEYS.dead, KEYS.dead_messages], 1, "{}"
    ),
}


@pytest.mark.parametrize("script", FULL)
def test_a_full_redis_refuses_none_of_the_scripts(there: Redis, script: str) -> None:
    push(there.client, "a", "1", "2")
    there.fetch("a", wanted=1)
    there.client.hset(KEYS.running(ME), "1", "alone 1 job")
    there.wait_for("other", 8, "a")
    fill(there.client)
    assert FULL[script](there)


def kombu_message(**changes: Any) -> dict[str, Any]:
    """A message as kombu writes it."""
    return {
        "body": "W1siXCJkZWxpdmVyeV9pbmZvXCI6IHt9Il0sIHt9LCB7fV0=",
        "headers": {"lang": "py", "stamps": {}, "group_index": 2**60},
        "properties": {"delivery_info": {"exchange": "", "routing_key": "a"}, "delivery_tag": "t"},
        **changes,
    }


MARKED = {"redelivered": True}


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
@pytest.mark.parametrize(
    "message",
    [
        kombu_message(),
        kombu_message(headers={}, properties={"delivery_info": {}, "empty": []}),
        kombu_message(body='"delivery_info": {"headers": {'),
        kombu_message(headers={"delivery_info": {"of": "the user"}, "headers": {"x": []}}),
    ],
)
def test_requeue_marks_headers_and_delivery_info_and_nothing_else(
    there: Redis, message: dict[str, Any], separators: tuple[str, str]
) -> None:
    expected = json.loads(json.dumps(message))
    expected["headers"] |= MARKED
    expected["properties"]["delivery_info"] |= MARKED
    push(there.client, "a", json.dumps(message, separators=separators))
    for _ in range(2):
        ((token, _, _),) = there.fetch("a")
        there.scripts.run("requeue", [KEYS.lease(ME)], "LPUSH", token)
        (again,) = there.queue("a")
        assert json.loads(again) == expected
        assert again.count("redelivered") == 2


@pytest.mark.parametrize("message", ["{}", "no json", '{"headers": {', '{"headers": null}', ""])
def test_requeue_keeps_a_message_without_marks_as_it_is(there: Redis, message: str) -> None:
    push(there.client, "a", message)
    ((token, _, _),) = there.fetch("a")
    there.scripts.run("requeue", [KEYS.lease(ME)], "LPUSH", token)
    assert there.queue("a") == [message]


def test_recover_keeps_the_original_order_of_every_queue(there: Redis) -> None:
    for start in range(0, 20, 2):
        push(there.client, "a", str(start), str(start + 1))
        push(there.client, "b", str(start))
    first = there.fetch("a", "b", wanted=30)
    assert len(first) == 30
    push(there.client, "a", "later")
    assert there.recover(beat=there.beat(), counts=1) == [30, 0]
    assert there.queue("a") == [*(str(number) for number in range(20)), "later"]
    assert there.queue("b") == [str(number) for number in range(0, 20, 2)]
    assert sorted(there.client.keys("batchery:*")) == [b"batchery:schema", b"batchery:token"]


def test_recover_keeps_messages_of_any_bytes(there: Redis) -> None:
    message = bytes(range(256)) + b"\0\0 \n"
    there.client.lpush("a", message)
    fixed = [KEYS.workers, KEYS.lease(ME), KEYS.token, KEYS.suspects, KEYS.waiting]
    keys = [*fixed, KEYS.running(ME), "a", *(f"a:t{number}" for number in range(8))]
    there.scripts.run("fetch", keys, ME, PLENTY, "", 1, 1, 1)
    there.recover()
    assert there.client.rpop("a") == message


def test_recover_is_refused_where_the_heartbeat_moved(there: Redis) -> None:
    push(there.client, "a", "1")
    there.fetch("a")
    assert there.recover(beat=str(int(there.beat()) - 1)) is None
    assert there.queue("a") == []
    assert there.renew()


def test_a_second_recovery_is_refused(there: Redis) -> None:
    beat = there.beat()
    assert there.recover(beat=beat) == [0, 0]
    assert there.recover(beat=beat) is None


def blamed(client: Any) -> dict[str, int]:
    found = client.hgetall(KEYS.suspects)
    return {task_id.decode(): int(deaths) for task_id, deaths in found.items()}


@pytest.mark.parametrize("are_too_many", [True, False])
def test_suspects_that_nobody_settles_do_not_heap_up(there: Redis, are_too_many: bool) -> None:
    fields = {f"old{number}": -1 for number in range(100_000 + are_too_many)}
    there.client.hset(KEYS.suspects, mapping=fields)
    push(there.client, "a", json.dumps(kombu_message(headers={"id": "job"})))
    there.fetch("a")
    assert there.recover(counts=1) == [1, 0]
    # The one that was just read when its worker died is there in any case.
    assert there.client.hlen(KEYS.suspects) == 1 + (0 if are_too_many else len(fields))


def test_recover_suspects_running_jobs_and_counts_only_jobs_alone(there: Redis) -> None:
    push(there.client, "a", *"123456")
    there.fetch("a")
    there.client.hset(KEYS.running(ME), "1", "shared 1 one 2 two")
    there.recover(beat=there.beat(), counts=1)
    assert blamed(there.client) == {"one": -2, "two": -2}
    assert there.client.ttl(KEYS.suspects) > 0
    there.register()
    tokens = {message: token for token, _, message in there.fetch("a")}
    there.client.hset(KEYS.running(ME), "2", f"alone {tokens['2']} two")
    there.recover(beat=there.beat(), counts=1)
    assert blamed(there.client) == {"one": -2, "two": 1}
    there.register()
    tokens = {message: token for token, _, message in there.fetch("a")}
    there.client.hset(KEYS.running(ME), "1", f"shared {tokens['1']} one {tokens['2']} two")
    assert there.recover(beat=there.beat(), counts=1) == [6, 2]
    assert blamed(there.client) == {"one": 0, "two": 1}


def test_two_that_ran_alone_at_the_same_time_are_not_counted(there: Redis) -> None:
    push(there.client, "a", "1", "2")
    there.fetch("a")
    there.client.hset(KEYS.running(ME), mapping={"1": "alone 1 one", "2": "alone 2 two"})
    there.recover(beat=there.beat(), counts=1)
    assert blamed(there.client) == {"one": 0, "two": 0}


def test_recover_suspects_what_its_worker_was_reading(there: Redis) -> None:
    jobs = ["a", "b", "c"]
    messages = [json.dumps(kombu_message(headers={"id": job})) for job in jobs]
    push(there.client, "a", *messages)
    there.fetch("a")
    there.client.hdel(KEYS.lease(ME), "2")  # It has been settled.
    there.client.hset(KEYS.running(ME), "1", "shared 1 a")  # It has begun to run.
    assert there.recover(beat=there.beat(), counts=1) == [2, 1]
    assert blamed(there.client) == {"a": 0, "delivery:c": 0}


def test_recover_counts_a_death_against_what_was_read_alone(there: Redis) -> None:
    push(there.client, "a", json.dumps(kombu_message(headers={"id": "odd id"})))
    for deaths in (1, 2):
        there.register()
        ((token, _, _),) = there.fetch("a")
        there.client.hset(KEYS.running(ME), "delivery", f"alone {token} {token}")
        there.recover(beat=there.beat(), counts=1)
        assert blamed(there.client)["delivery:odd%20id"] == deaths


@pytest.mark.parametrize(
    "job", ["7fd2-a_b.c", "odd id", "50%?", "a/b~c", "größe", "\u65e5\u672c", "a\tb"]
)
def test_recover_finds_the_id_of_what_was_being_read(there: Redis, job: str) -> None:
    push(there.client, "a", json.dumps(kombu_message(headers={"id": job, "stamps": {"id": "x"}})))
    there.fetch("a")
    there.recover(beat=there.beat(), counts=1)
    assert blamed(there.client) == {f"delivery:{encode_id(job)}": 0}


@pytest.mark.parametrize(
    "message", ["", "nonsense", "[]", "7", "{}", '{"headers": 1}', '{"headers": {"id": 5}}']
)
def test_recover_blames_nobody_for_a_message_without_an_id(there: Redis, message: str) -> None:
    push(there.client, "a", message)
    there.fetch("a")
    assert there.recover(beat=there.beat(), counts=1) == [1, 0]
    assert blamed(there.client) == {}
    assert len(there.queue("a")) == 1


def test_dead_letter_script_moves_a_message_once_or_not_at_all(there: Redis) -> None:
    push(there.client, "a", "broken")
    there.fetch("a")
    keys = [KEYS.lease(ME), KEYS.dead, KEYS.dead_messages]
    for key in keys[1:]:
        there.client.set(key, "of another type")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            there.scripts.run("dead_letter", keys, 1, "{}")
        there.client.delete(key)
    assert there.scripts.run("dead_letter", keys, 1, json.dumps({"reason": "it is"})) == 1
    assert there.scripts.run("dead_letter", keys, 1, "{}") == 0
    assert there.leases() == {}
    assert there.client.hget(KEYS.dead_messages, "1") == b"a\0broken"
    assert json.loads(there.client.hget(KEYS.dead, "1").partition(b"\0")[2]) == {"reason": "it is"}


def test_tokens_are_not_given_twice_after_redis_lost_them(there: Redis) -> None:
    there.client.flushall()
    there.register(last=41)
    push(there.client, "a", "1")
    assert there.fetch("a")[0][0] == 42
    there.register("another", last=3)
    push(there.client, "a", "2")
    assert there.fetch("a")[0][0] == 43


def test_a_worker_of_an_older_layout_is_not_entered_and_changes_nothing(there: Redis) -> None:
    client = there.client
    assert client.get(KEYS.schema) == b"1"
    # One of an older layout lives, and then none does.
    assert there.scripts.run("register", REGISTERS, "newer", "{}", 0, 3) == 1
    assert client.zrange(KEYS.workers, 0, -1) == [ME.encode()]
    client.zadd(KEYS.workers, {ME: 1})
    assert there.scripts.run("register", REGISTERS, "newer", "{}", 0, 3) == 0
    before = {key: client.dump(key) for key in client.scan_iter()}
    assert there.scripts.run("register", REGISTERS, "older", "{}", 99, 2) == 3
    assert {key: client.dump(key) for key in client.scan_iter()} == before
    assert client.get(KEYS.schema) == b"3"


def test_what_cannot_go_back_stays_with_its_lease(there: Redis) -> None:
    push(there.client, "a", "1")
    push(there.client, "b", "2")
    assert len(there.fetch("a", "b")) == 2
    there.client.set("b", "of another type")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        there.recover(beat=there.beat(), counts=1)
    assert there.scripts.run("requeue", [KEYS.lease(ME)], "RPUSH", 1, 2) == 1
    assert there.client.hkeys(KEYS.lease(ME)) == [b"2"]
    assert there.queue("a") == ["1"]
    there.client.delete("b")
    assert there.recover(beat=there.beat(), counts=1) == [1, 0]
    assert there.queue("b") == ["2"]


def test_a_time_that_is_none_tells_nothing_of_what_waits(there: Redis) -> None:
    for sent_at in ("1.2.3", "...", "2.5", "9"):
        there.client.lpush("a", f'{{"headers": {{"batchery_sent_at": {sent_at}}}}}')
        there.client.lpush("b", f'{{"headers": {{"batchery_sent_at": {sent_at}}}}}')
        there.client.rpoplpush("b", "c")
    keys = ["c", "a"]
    assert there.scripts.run("count_waiting", keys) == [8, b""]
    there.client.rpop("a", 2)
    assert there.scripts.run("count_waiting", keys) == [6, b"2.5"]
