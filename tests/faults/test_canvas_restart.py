"""Canvas of every form with the worker ended in the middle: each ends exactly right in the next."""

import itertools
from collections import Counter
from typing import Any, NamedTuple

import pytest
from celery import chord, group

from apps import canvas
from conftest import StartWorker
from support.harness import queue_length, unsettled, wait_for
from support.patience import patient

TIMEOUT_S = patient(60)

#: What both workers consume; `later` comes to it.
QUEUES = ",".join(
    ["celery", *(task.name for task in (canvas.quick, canvas.thrice, canvas.shout, canvas.total))]
)

#: Jobs that make a full batch of `later`, which is taken while another batch is still running.
FULL = canvas.later.max_batch_size or 0


class Sent(NamedTuple):
    """What was sent before the worker was ended."""

    chain: Any
    group: Any
    chord: Any
    failing_chord: Any
    linked: Any
    failing: Any
    retried: Any


class Run(NamedTuple):
    """Two workers, one after the other."""

    sent: Sent
    pids: tuple[int, int]


def later(item: Any) -> Any:
    return canvas.later.s(item).set(queue="later")


def send() -> Sent:
    """Sends all but the job that holds the worker up; half of each canvas can run at once."""
    steps: Any = canvas.quick.s("chain") | canvas.later.s().set(queue="later") | canvas.shout.s()
    halves = [canvas.quick.s(number) for number in range(25)] + list(map(later, range(25, 50)))
    header = [canvas.quick.s(number) for number in range(100, 110)]
    late = list(map(later, range(110, 120)))
    wrong = [canvas.quick.s("fine"), *map(later, ("good", "bad member", "better"))]
    callback = canvas.callback.s()
    return Sent(
        chain=steps.apply_async(),
        group=group(halves).apply_async(),
        chord=chord(header + late)(canvas.total.s()),
        failing_chord=chord(wrong)(canvas.total.s()),
        linked=later("linked").apply_async(link=callback),
        failing=later("bad luck").apply_async(link_error=callback),
        retried=None,
    )


def executed() -> list[Any]:
    with canvas.redis() as redis:
        return [item for item, _ in canvas.executions(redis)]


@pytest.fixture(scope="module")
def run(start_module_worker: StartWorker, redis_url: str) -> Run:
    canvas.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    worker = start_module_worker("apps.canvas", "-P", "threads", "-Q", QUEUES)
    sent = send()
    quick = {"chain", "fine", *range(25), *range(100, 110)}
    wait_for(lambda: set(executed()) == quick, "the first halves")
    sent = sent._replace(retried=canvas.thrice.delay("retried"))
    with canvas.redis() as redis:
        wait_for(lambda: redis.exists(canvas.AT_GATE), "the third attempt")
        # The device is held up; a full batch of the other halves joins it there, the rest waits.
        wait_for(
            lambda: queue_length(redis_url, "later") == 25 + 10 + 3 + 2 + 1, "the chain's step"
        )
        canvas.app.control.add_consumer("later", reply=True, timeout=TIMEOUT_S, limit=1)
        wait_for(
            lambda: worker.batches_in_flight(canvas.app) == 2,
            "a batch behind the one that is held up",
        )
        assert set(executed()) == quick | {"retried"}
        worker.process.terminate()
        wait_for(lambda: "Warm shutdown" in worker.log, "the end of the first worker begun")
        redis.set(canvas.GATE, 1)
    assert worker.wait_exit() == 0, worker.log
    assert queue_length(redis_url, "later") == 41 - FULL
    second = start_module_worker("apps.canvas", "-P", "threads", "-Q", f"{QUEUES},later")
    return Run(sent, (worker.pid, second.pid))


def by_worker(run: Run, items: set[Any]) -> Counter[int]:
    """How many of the items each worker executed, in the end; no item twice."""
    wait_for(lambda: items <= set(executed()), "all items executed")
    with canvas.redis() as redis:
        seen = [(item, pid) for item, pid in canvas.executions(redis) if item in items]
    assert sorted(map(str, items)) == sorted(str(item) for item, _ in seen)
    return Counter(run.pids.index(pid) for _, pid in seen)


def test_a_chain_goes_on_with_its_next_step(run: Run) -> None:
    assert run.sent.chain.get(timeout=TIMEOUT_S) == "CHAIN"
    assert executed().count("chain") == 2


def test_a_group_of_fifty_is_whole(run: Run) -> None:
    assert run.sent.group.get(timeout=TIMEOUT_S) == list(range(50))
    assert by_worker(run, set(range(50)))[0] >= 25


def test_a_chord_calls_back_once_with_every_member(run: Run) -> None:
    members = list(range(100, 120))
    assert run.sent.chord.get(timeout=TIMEOUT_S) == sum(members)
    assert by_worker(run, set(members))[0] >= 10
    assert executed().count(f"total of {members}") == 1


def test_a_chord_with_a_failing_member_fails_and_does_not_call_back(run: Run) -> None:
    with pytest.raises(Exception, match="bad member"):
        run.sent.failing_chord.get(timeout=TIMEOUT_S)
    by_worker(run, {"fine", "good", "bad member", "better"})
    # Its members are all there now: were it called back, it would be by now, or after the others.
    assert run.sent.chord.get(timeout=TIMEOUT_S)
    assert [item for item in executed() if "total of" in str(item)] == [
        f"total of {list(range(100, 120))}"
    ]


def test_callbacks_are_called_once_each(run: Run) -> None:
    assert run.sent.linked.get(timeout=TIMEOUT_S) == "linked"
    with pytest.raises(LookupError, match="bad luck"):
        run.sent.failing.get(timeout=TIMEOUT_S)
    wanted = {"callback linked", f"callback {run.sent.failing.id}"}
    by_worker(run, wanted)


def test_job_with_three_retries_succeeds_across_a_restart(run: Run) -> None:
    assert run.sent.retried.get(timeout=TIMEOUT_S) == "retried after 3"
    with canvas.redis() as redis:
        attempts = [pid for item, pid in canvas.executions(redis) if item == "retried"]
    assert attempts == [run.pids[0]] * 3 + [run.pids[1]]


def test_batch_on_the_device_is_finished_by_the_worker_that_stops(run: Run) -> None:
    late = {*range(25, 50), *range(110, 120), "good", "bad member", "better", "linked", "bad luck"}
    workers = by_worker(run, late)
    # The chain's second step is the 41st of them.
    assert FULL - 1 <= workers[0] <= FULL
    assert sum(workers.values()) == 40


def test_restart_leaves_nothing_in_redis(run: Run, redis_url: str) -> None:
    results = itertools.chain(run.sent.group.results or (), run.sent[2:])
    wait_for(lambda: all(each.ready() for each in results), "all results")
    wait_for(lambda: not unsettled(redis_url), "everything acknowledged")
    assert sum(queue_length(redis_url, name) for name in [*QUEUES.split(","), "later"]) == 0
