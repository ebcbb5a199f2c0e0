"""The parts of the fault harness that need no processes."""

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError, RedisError

from batchery import StartError
from batchery_worker.devstack.redis_server import EmbeddedRedis
from benchmarks.chaos.answers import Answer, Answers
from benchmarks.chaos.chaos import Run, Traces
from benchmarks.chaos.families import Families
from benchmarks.chaos.flatness import Growth, Sample, compare
from benchmarks.chaos.garbage import garbage
from benchmarks.chaos.ledger import Book, Execution, Receipt, executions, receipts
from benchmarks.chaos.outbox import Outbox, Submission
from benchmarks.chaos.plan import LONGEST_BATCH_S, Plan
from benchmarks.chaos.proxy import Proxy
from benchmarks.chaos.recovery import Loss, recoveries
from benchmarks.chaos.schedule import Action, Event, schedule
from benchmarks.chaos.server import FaultyRedis
from benchmarks.chaos.verdict import Verdict
from benchmarks.chaos.watcher import PREFIX, Watcher
from benchmarks.chaos.workload import Kind, Order, orders
from support.harness import open_redis, wait_for

PLAN = Plan(kills=5, device_kills=4, stops=3, redis_restarts=2, cuts=2, fills=1, malformed=6)


def test_a_schedule_is_the_same_for_the_same_seed_only() -> None:
    assert schedule(PLAN) == schedule(PLAN)
    assert schedule(PLAN) != schedule(replace(PLAN, seed=1))


def test_a_schedule_has_each_fault_as_often_as_planned_and_an_end_for_each() -> None:
    events = schedule(PLAN)
    times = Counter(event.action for event in events)
    assert times == {
        Action.KILL_WORKER: 5,
        Action.SCALE: 5 + 2,
        Action.KILL_DEVICE: 4,
        Action.KILL_CHILD: 2,
        Action.STOP_WORKER: 3,
        Action.CONTINUE_WORKER: 3,
        Action.REDIS_DOWN: 2,
        Action.REDIS_UP: 2,
        Action.CUT: 2,
        Action.FILL: 1,
        Action.FREE: 1,
        Action.FAIL_OVER: 1,
        Action.FOLLOW: 1,
        Action.MALFORMED: 6,
    }
    assert events == sorted(events)
    begins = [each for each in events if each.action in (Action.KILL_WORKER, Action.CUT)]
    assert all(PLAN.gap_s <= each.at_s <= PLAN.duration_s - PLAN.gap_s for each in begins)
    numbers = [each.number for each in events if each.action is Action.SCALE]
    assert all(1 <= number <= PLAN.max_workers for number in numbers)


def test_a_stretched_plan_has_the_same_mix_of_faults_in_each_of_its_rounds() -> None:
    plan = replace(PLAN, gap_s=10.0)
    longer = plan.stretch(60)
    assert 3600 <= longer.duration_s < 3600 + plan.faults * plan.gap_s
    assert longer.faults == longer.rounds * plan.faults
    times = Counter(event.action for event in schedule(longer))
    assert times[Action.KILL_WORKER] == 5 * longer.rounds
    assert times[Action.MALFORMED] == 6 * longer.rounds
    first_s = (plan.faults + 1) * plan.gap_s
    first = [e for e in schedule(longer) if e.action is Action.KILL_DEVICE and e.at_s < first_s]
    assert len(first) == 4
    crowded = replace(plan, min_workers=3, max_workers=3)
    numbers = {e.number for e in schedule(crowded) if e.action is Action.KILL_WORKER}
    assert numbers == {3}


def test_jobs_are_of_all_kinds_and_have_results_of_their_own() -> None:
    some = list(orders(PLAN))
    assert len(some) == PLAN.jobs
    assert {order.kind for order in some} == set(Kind)
    assert some == list(orders(PLAN))
    results = {json.dumps(order.expected) for order in some}
    assert len(results) == len(some)
    assert list(orders(replace(PLAN, jobs=PLAN.jobs - 100), 100)) == some[100:]


#: Longer than the plan: all kills are repeated.
REFUSE_S = 60


class Instrument:
    """Stands in for cluster, outbox and watcher, in a time of its own."""

    def __init__(self, answers_until_s: float) -> None:
        self.now_s = 0.0
        self.is_ready = True
        self.ended = 0
        self.actions: list[tuple[float, str]] = []
        self.sent_s: list[float] = []
        self.thrown = 0
        self.done: Counter[Action] = Counter()
        self.refuse: Action | None = None
        self.answers_per_s = 1
        self._answers_until_s = answers_until_s
        self._waiting: list[Order] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def tend(self) -> None: ...

    def heal(self) -> None:
        self.actions.append((self.now_s, "heal"))

    def apply(self, event: Event) -> bool:
        self.actions.append((self.now_s, event.action))
        return not (event.action is self.refuse and self.now_s < REFUSE_S)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, some: Iterable[Order]) -> None:
        self._waiting += some

    def flush(self) -> list[Submission]:
        done, self._waiting = self._waiting, []
        self.sent_s += [self.now_s] * len(done)
        return [submission(order.number) for order in done]

    def throw(self, message: bytes) -> bool:
        self.thrown += 1
        return True

    def expect(self, task_ids: Iterable[str]) -> None: ...

    @property
    def answered(self) -> int:
        could = int(min(self.now_s, self._answers_until_s) * self.answers_per_s)
        return min(could, len(self.sent_s))

    @property
    def unanswered(self) -> int:
        return len(self.sent_s) - self.answered


def test_run_spreads_jobs_over_the_faults_and_waits_until_its_timeout() -> None:
    tool: Any = Instrument(answers_until_s=100)
    run = Run(PLAN, tool, tool, tool, tool.clock, tool.sleep)
    run.warm_up()
    run.torment()
    assert [each.order.number for each in run.submissions] == list(range(PLAN.jobs))
    half = tool.sent_s[PLAN.jobs // 2]
    assert half == pytest.approx(PLAN.duration_s / 2, rel=0.05)
    planned = [each for each in schedule(PLAN) if each.action is not Action.MALFORMED]
    assert [action for _, action in tool.actions] == [each.action for each in planned]
    assert tool.thrown == PLAN.malformed
    run.settle()
    # The last answer came after 100 s; others never do.
    assert tool.now_s == pytest.approx(100 + PLAN.patience_s, abs=2)


def test_a_kill_that_finds_nothing_is_repeated_and_workers_are_asked_for_after_it() -> None:
    tool: Any = Instrument(answers_until_s=100)
    tool.refuse = Action.KILL_WORKER
    Run(PLAN, tool, tool, tool, tool.clock, tool.sleep).torment()
    times_s = [at_s for at_s, action in tool.actions if action == Action.KILL_WORKER]
    assert sum(at_s >= REFUSE_S for at_s in times_s) == PLAN.kills
    assert tool.actions[-1][1] == Action.SCALE


def test_the_load_is_a_part_of_what_a_calibration_shows() -> None:
    tool: Any = Instrument(answers_until_s=1e9)
    tool.answers_per_s = 10
    plan = replace(PLAN, load=0.8)
    assert plan.batch_s == LONGEST_BATCH_S
    run = Run(plan, tool, tool, tool, tool.clock, tool.sleep)
    run.calibrate()
    assert run.capacity_per_s == pytest.approx(10, rel=0.01)
    begun = len(run.submissions)
    assert tool.actions[-1][1] == "heal"
    run.torment()
    numbers = [each.order.number for each in run.submissions]
    assert numbers == list(range(begun + int(0.8 * run.capacity_per_s * plan.duration_s)))


def test_a_calibration_without_an_end_is_given_up() -> None:
    tool: Any = Instrument(answers_until_s=5)
    run = Run(replace(PLAN, load=0.8), tool, tool, tool, tool.clock, tool.sleep)
    with pytest.raises(StartError, match=r"the calibration lacks \d+ results"):
        run.calibrate()


def test_a_run_whose_workers_end_at_the_start_says_why() -> None:
    tool: Any = Instrument(0)
    tool.is_ready, tool.ended, tool.last_words = False, 3, "No module named 'nonsense'"
    with pytest.raises(StartError, match="no worker starts: No module named 'nonsense'"):
        Run(PLAN, tool, tool, tool, tool.clock, tool.sleep).warm_up()


def stored(result: Any, status: str = "SUCCESS", date: str = "today") -> bytes:
    return json.dumps({"status": status, "result": result, "date_done": date}).encode()


def test_a_result_is_doubled_when_it_is_stored_again_differently() -> None:
    answers = Answers()
    assert not answers.saw("a", stored(None, "STARTED"), 1.0)
    assert answers.saw("a", stored(1), 2.0)
    assert not answers.saw("a", stored(1), 3.0)  # Read, and announced as well.
    assert not answers.saw("a", stored(None, "STARTED"), 4.0)  # An announcement that was late.
    assert answers.changed == {}
    answers.saw("a", stored(1, date="tomorrow"), 5.0)
    assert set(answers.changed) == {"a"}
    assert answers.first["a"].at_s == 2.0
    answers.saw("b", b"no json", 6.0)
    answers.saw("b", stored(1), 7.0)
    assert set(answers.changed) == {"a"}
    assert answers.first["b"].state == "UNREADABLE"


def submission(number: int, kind: Kind = Kind.PLAIN, callbacks: str = "") -> Submission:
    ids = (*callbacks.split(), f"job{number}")
    return Submission(Order(number, kind), ids, frozenset(callbacks.split()))


def verdict() -> Verdict:
    return Verdict("stock", 0, 1.0, {})


def test_a_verdict_tells_lost_stuck_and_wrong_apart() -> None:
    some = [submission(number) for number in range(5)]
    answers = Answers()
    answers.saw("job0", stored(Order(0, Kind.PLAIN).expected), 1)
    answers.saw("job1", stored("something else"), 1)
    answers.saw("job2", stored(Order(2, Kind.PLAIN).expected, "FAILURE"), 1)
    judged = verdict()
    judged.judge(some, answers, lambda task_id: task_id == "job3")
    counts = (judged.submitted, judged.answered, judged.wrong, judged.stuck, judged.lost)
    assert counts == (5, 3, 2, 1, 1)
    assert not judged.is_good
    assert "lost: plain job4" in judged.text
    assert judged.info["stuck"] == 1


def test_a_good_run_may_execute_twice_but_not_send_or_answer_twice() -> None:
    chain = submission(1, Kind.CHAIN, "second")
    again = [Receipt(1, 1.0, "second", "tag"), Receipt(2, 2.0, "second", "tag")]
    twice = [Execution(1, 1.0, 1, 3), Execution(2, 2.0, 1, 3)]
    judged = verdict()
    judged.count([chain], again, twice)
    assert (judged.executions, judged.repeated) == (2, 1)
    assert judged.is_good
    judged.count([chain], [*again, Receipt(2, 3.0, "second", "another")], twice)
    assert judged.doubled_callbacks == 1
    assert not judged.is_good


def test_a_recovery_ends_when_the_last_job_of_a_lost_worker_is_elsewhere() -> None:
    history = [
        Receipt(1, 1.0, "done", "t1"),
        Receipt(1, 1.0, "moved", "t2"),
        Receipt(1, 1.0, "answered", "t3"),
        Receipt(1, 1.0, "never", "t4"),
        Receipt(2, 1.0, "other", "t5"),
        Receipt(2, 8.0, "moved", "t2"),
    ]
    answers = {
        "done": Answer(2.0, b"", "SUCCESS", None),
        "moved": Answer(20.0, b"", "SUCCESS", None),
        "answered": Answer(5.0, b"", "SUCCESS", None),
    }
    loss = Loss(1, 3.0, "kill worker", others=1)
    (found,) = recoveries([loss], history, answers, [3.0])
    assert (found.jobs, found.seconds, found.is_calm) == (2, 5.0, True)
    (found,) = recoveries([loss], history, answers, [3.0, 4.0])
    assert not found.is_calm
    (found,) = recoveries([replace(loss, others=0)], history, answers, [3.0])
    assert not found.is_calm
    judged = verdict()
    judged.follow([found])
    assert (judged.longest_recovery_s, judged.longest_troubled_recovery_s) == (0, 5.0)


def samples(**figures: list[float]) -> list[Sample]:
    rows = zip(*figures.values(), strict=True)
    return [Sample(float(at), dict(zip(figures, row, strict=True))) for at, row in enumerate(rows)]


def test_what_grows_is_told_from_what_scatters_and_from_a_warm_up() -> None:
    megabyte = float(1 << 20)
    some = samples(
        **{
            "elder: resident bytes": [50 * megabyte + n * megabyte for n in range(16)],
            "device: resident bytes": [n * megabyte for n in (1, 9, 50, 60)] + [80 * megabyte] * 12,
            "results keys": [1000.0 + 60 * (n % 2) for n in range(16)],
            "bindings members": [float(n) * 3 for n in range(16)],
            "queue members": [float(n) * 3 for n in range(16)],
        }
    )
    found = compare(some, lambda figure: figure != "queue members")
    assert [each.figure for each in found if not each.is_flat] == [
        "bindings members",
        "elder: resident bytes",
    ]
    growth = next(each for each in found if each.figure == "bindings members")
    assert (growth.early, growth.late) == (16.5, 40.5)
    judged = verdict()
    judged.growth, judged.samples = found, some
    assert not judged.is_good
    assert "grown: bindings members: 16.5 to 40.5" in judged.text
    assert judged.info["samples"]["at_s"] == [each.at_s for each in some]
    assert compare(some[:7], bool) == []


def test_a_count_that_a_sample_lacks_was_none_and_a_size_was_not_measured() -> None:
    figures = {"dead keys": 9.0, "x bytes": 1.0}
    some = [Sample(float(at), figures if at in (6, 13) else {}) for at in range(16)]
    assert compare(some, bool) == [
        Growth("dead keys", 0.0, 0.0, is_flat=True),
        Growth("x bytes", 1.0, 1.0, is_flat=True),
    ]


def test_each_family_of_keys_has_its_bound_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "leases.md").read_text(encoding="utf-8")
    table = page.partition("## What Redis holds")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert all(len(row) == 3 and row[2].strip(" |") for row in rows)
    named = [pattern for row in rows for pattern in re.findall("`(.+?)`", row[0])]
    assert sorted(named) == sorted(Families("QUEUE").patterns)


def test_a_key_is_of_one_family_or_of_none() -> None:
    families = Families("chaos")
    keys = {
        "chaos": "chaos",
        "chaos\x06\x166": "chaos[^!-~][^!-~][0-9]",
        "batchery:lease:w1": "batchery:lease:*",
        "batchery:dead-messages": "batchery:dead-messages",
        "celery-task-meta-id": "celery-task-meta-*",
        "_kombu.binding.celery.pidbox": "_kombu.binding*",
        "id.reply.celery.pidbox": "*.reply.celery.pidbox*",
        "batchery:new": None,
        "other": None,
    }
    assert {key: families.find(key) for key in keys} == keys
    assert families.counts_jobs("chaos")
    assert not families.counts_jobs("batchery:dead")
    judged = verdict()
    judged.unknown_keys = ["batchery:new"]
    assert not judged.is_good
    assert "of no known family: 'batchery:new'" in judged.text


def test_a_result_that_will_not_be_there_at_the_end_is_read_twice(redis_url: str) -> None:
    with closing(Redis.from_url(redis_url)) as redis:
        redis.flushdb()
        redis.set(f"{PREFIX}a", stored(1))
        watcher = Watcher(redis_url, time.monotonic, keep_s=4)
        with closing(watcher):
            watcher.expect(["a"])
            wait_for(lambda: watcher.answered == 1, "the first look")
            # Not announced.
            redis.set(f"{PREFIX}a", stored(1, date="tomorrow"))
            wait_for(lambda: "a" in watcher.answers.changed, "the second look")


def test_a_ledger_keeps_what_was_written(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.received("task", "tag")
    book.executed([{"job": 1, "value": 2}, {"job": 3, "value": 4}])
    assert [(each.task_id, each.tag) for each in receipts(tmp_path)] == [("task", "tag")]
    assert [(each.job, each.value) for each in executions(tmp_path)] == [(1, 2), (3, 4)]


def test_garbage_differs_and_none_of_it_is_a_message() -> None:
    kinds = [garbage(number) for number in range(12)]
    assert len(set(kinds)) == 12
    assert kinds[0] == garbage(12)


def test_a_proxy_cuts_what_is_connected_and_follows_its_target(redis_server: EmbeddedRedis) -> None:
    with Proxy(redis_server.port) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as line:
            assert ask(line)
            assert proxy.cut() == 1
            assert line.recv(100) == b""
        proxy.target = 1  # Nobody listens there.
        with socket.create_connection(("127.0.0.1", proxy.port)) as line:
            assert line.recv(100) == b""
        proxy.target = redis_server.port
        with socket.create_connection(("127.0.0.1", proxy.port)) as line:
            assert ask(line)


def ask(line: socket.socket) -> bytes:
    line.sendall(b"PING\r\n")
    return line.recv(100)


def test_an_outbox_submits_each_job_once_and_whole(redis_url: str) -> None:
    outbox = Outbox(redis_url)
    with closing(outbox), open_redis(redis_url) as redis:
        redis.flushdb()
        outbox.add(Order(number, kind) for number, kind in enumerate(Kind))
        assert len(outbox) == len(Kind)
        done = {each.order.kind: each for each in outbox.flush()}
        assert len(outbox) == 0
        tasks = {kind: len(each.task_ids) for kind, each in done.items()}
        parts = {Kind.CHAIN: 3, Kind.MIXED_CHAIN: 3, Kind.CHORD: 4}
        assert tasks == {kind: parts.get(kind, 1) for kind in Kind}
        later = {kind: len(each.sent_once) for kind, each in done.items()}
        # The last step of a mixed chain is sent by an ordinary task.
        sent = {Kind.CHAIN: 2, Kind.MIXED_CHAIN: 1, Kind.CHORD: 1}
        assert later == {kind: sent.get(kind, 0) for kind in Kind}
        headers = [json.loads(each)["headers"] for each in redis.lrange("chaos", 0, -1)]
        assert len(headers) == 1 + 1 + 1 + 1 + 1 + 3
        assert {"v": 1, "n": 3} in [each.get("batchery") for each in headers]
        outbox.add([Order(0, Kind.PLAIN)])
        outbox.flush()
        assert redis.llen("chaos") == 8


def test_an_outbox_keeps_what_redis_refuses(redis_url: str) -> None:
    outbox = Outbox(redis_url)
    with closing(outbox), open_redis(redis_url) as redis:
        redis.flushdb()
        redis.config_set("maxmemory", 1)
        try:
            outbox.add([Order(0, Kind.PLAIN), Order(1, Kind.CHORD)])
            assert outbox.flush() == []
            assert not outbox.throw(b"garbage")
        finally:
            redis.config_set("maxmemory", 0)
        assert len(outbox.flush()) == 2
        assert redis.llen("chaos") == 4


def test_a_faulty_redis_keeps_its_data_and_its_addresses(tmp_path: Path) -> None:
    server = FaultyRedis(tmp_path / "redis")
    with closing(server), closing(Redis.from_url(server.url)) as redis:
        redis.set("kept", 1)
        server.kill()
        assert not server.fill()
        with pytest.raises(RedisError):
            redis.get("kept")
        server.restart()
        assert redis.get("kept") == b"1"
        assert redis.config_get("appendfsync") == {"appendfsync": "always"}
        assert server.fill()
        with pytest.raises(OutOfMemoryError):
            redis.set("more", 1)
        assert server.free()
        with closing(Redis.from_url(server.worker_url)) as worker:
            assert worker.get("kept") == b"1"
            assert server.cut() == 1


def test_a_faulty_redis_fails_over_and_back_without_a_loss(tmp_path: Path) -> None:
    server = FaultyRedis(tmp_path / "redis")
    with closing(server):
        for number in range(2):
            with closing(Redis.from_url(server.worker_url)) as worker:
                worker.rpush("kept", number)
                assert server.fail_over()
                with pytest.raises(RedisError):
                    worker.rpush("kept", "refused")
            with closing(Redis.from_url(server.url)) as redis, pytest.raises(ReadOnlyError):
                redis.rpush("kept", "refused")
            server.follow()
        server.kill()
        assert not server.fail_over()
        server.restart()
        with closing(Redis.from_url(server.worker_url)) as worker:
            assert worker.lrange("kept", 0, -1) == [b"0", b"1"]


def test_traces_are_found_wherever_a_transport_keeps_messages(redis_url: str) -> None:
    with open_redis(redis_url) as redis:
        redis.flushdb()
        redis.lpush("list", "...in-list...")
        redis.hset("hash", "tag", "...in-hash...")
        redis.zadd("zset", {"...in-zset...": 1})
        redis.sadd("set", "...in-set...")
        redis.set("celery-task-meta-x", "...in-result...")
        traces = Traces(redis)
        found = [traces.has(f"in-{kind}") for kind in ("list", "hash", "zset", "set", "result")]
        assert found == [True, True, True, True, False]
