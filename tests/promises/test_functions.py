"""The batch contract, seen by callers of a real worker."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from apps import shop
from batchery import BatchArgumentError, ItemFailed
from conftest import StartWorker
from support.harness import Worker, device_busy, unsettled, wait_for
from support.patience import TIMEOUT_S


@pytest.fixture(autouse=True, scope="module")
def worker(start_module_worker: StartWorker, redis_url: str) -> Worker:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)
    return start_module_worker("apps.shop", "-E")


def answer(**item: Any) -> Any:
    return shop.moody.delay(item).get(timeout=TIMEOUT_S)


def test_one_job_is_one_item_is_one_result() -> None:
    assert shop.shout.delay("hello").get(timeout=TIMEOUT_S) == "HELLO"


def test_every_caller_gets_its_own_result() -> None:
    texts = [f"text {number}" for number in range(300)]
    results = shop.shout.submit_many(texts)
    assert results.get(timeout=TIMEOUT_S) == [text.upper() for text in texts]


def test_jobs_that_wait_while_a_batch_runs_share_the_next_one(
    worker: Worker, tmp_path: Path
) -> None:
    with device_busy(worker, shop.app, shop.until.name, tmp_path / "gate"):
        jobs = shop.read_batch.submit_many(range(20))
    assert max(len(result["mates"]) for result in jobs.get(timeout=TIMEOUT_S)) > 5


def test_jobs_that_are_left_over_share_the_next_batch_with_those_that_come_meanwhile() -> None:
    shop.read_batch.delay(0).get(timeout=TIMEOUT_S)
    # So short that nothing is read beside it, but for the one job that is too many.
    first = shop.read_batch.submit_many(range(65), {"pause_s": 0.5})
    time.sleep(0.2)
    jobs = shop.read_batch.submit_many(range(100, 120), {"pause_s": 0.5})
    sizes = {len(each["mates"]) for each in jobs.get(timeout=TIMEOUT_S)}
    assert sizes == {21}
    assert len(first.get(timeout=TIMEOUT_S)[64]["mates"]) == 21


def test_jobs_with_different_keywords_never_share_a_batch() -> None:
    shop.read_batch.submit_many(range(1), {"pause_s": 0.5})
    jobs = [shop.read_batch.delay(number, tag=f"t{number % 3}") for number in range(30)]
    results = [job.get(timeout=TIMEOUT_S) for job in jobs]
    for number, result in enumerate(results):
        assert result["tag"] == f"t{number % 3}"
        assert {mate % 3 for mate in result["mates"]} == {number % 3}


def test_an_idle_device_waits_max_wait_ms_for_a_batch_to_fill() -> None:
    assert shop.patient.delay(1).get(timeout=TIMEOUT_S) == 1
    sizes = shop.patient.submit_many(range(8)).get(timeout=TIMEOUT_S)
    assert sizes == [8] * 8


def test_a_method_gets_its_task() -> None:
    assert shop.bound.delay("x").get(timeout=TIMEOUT_S) == "apps.shop.bound:x"


def test_an_async_function_runs() -> None:
    assert shop.asynchronous.delay("abc").get(timeout=TIMEOUT_S) == "cba"


def test_a_task_class_runs() -> None:
    assert shop.shelf.delay(41).get(timeout=TIMEOUT_S) == 42


def test_an_ordinary_task_runs_beside() -> None:
    assert shop.double.delay(21).get(timeout=TIMEOUT_S) == 42


def test_failed_with_a_text_raises_item_failed() -> None:
    with pytest.raises(ItemFailed, match="out of stock"):
        answer(answer="failed", why="out of stock")


def test_failed_with_an_exception_raises_it() -> None:
    with pytest.raises(LookupError, match="out of stock"):
        answer(answer="failed-exception", why="out of stock")


def test_retry_after_runs_again_until_max_retries() -> None:
    with pytest.raises(ConnectionError, match="come back later"):
        answer(answer="retry")


def test_retry_after_succeeds_in_the_end(tmp_path: Path) -> None:
    assert shop.third_time.delay(str(tmp_path / "attempts")).get(timeout=TIMEOUT_S) == 3


def test_autoretry_sees_the_exception_of_one_job(tmp_path: Path) -> None:
    assert shop.flaky.delay(str(tmp_path / "attempt")).get(timeout=TIMEOUT_S) == 1


def test_ignore_stores_nothing_and_frees_the_message(redis_url: str) -> None:
    job = shop.moody.delay({"answer": "ignore"})
    mate = shop.moody.delay({"answer": "value", "value": 7})
    assert mate.get(timeout=TIMEOUT_S) == 7
    wait_for(lambda: unsettled(redis_url) == 0, "no message unacknowledged")
    assert job.state == "PENDING"


def test_reject_fails_the_job_for_good() -> None:
    job = shop.moody.delay({"answer": "reject"})
    wait_for(lambda: job.state == "FAILURE", "job rejected")


def test_dates_travel_as_celery_spells_them() -> None:
    assert answer(answer="date").isoformat() == "2026-01-02T00:00:00+00:00"


def test_a_keyword_that_the_function_does_not_take_is_refused_by_the_client() -> None:
    with pytest.raises(TypeError, match="colour"):
        shop.shout.delay("x", colour="red")


def test_a_plain_client_that_passes_two_arguments_gets_a_clear_error(client: Celery) -> None:
    job = client.send_task("apps.shop.shout", ["a", "b"])
    with pytest.raises(BatchArgumentError, match="exactly one positional argument"):
        job.get(timeout=TIMEOUT_S)


def test_a_multi_item_message_is_answered_item_by_item(client: Celery) -> None:
    job = client.send_task(
        "apps.shop.nasty",
        [["a", "raise", "c"]],
        headers={"batchery": {"v": 1, "n": 3}},
    )
    assert job.get(timeout=TIMEOUT_S) == [
        {"ok": "A"},
        {"error": {"type": "KeyError", "message": "'a bad one'"}},
        {"ok": "C"},
    ]


def test_limits_count_items_not_messages(client: Celery) -> None:
    job = client.send_task(
        "apps.shop.read_batch",
        [list(range(150))],
        headers={"batchery": {"v": 1, "n": 150}},
    )
    entries = job.get(timeout=TIMEOUT_S)
    assert [entry["ok"]["item"] for entry in entries] == list(range(150))
    assert max(len(entry["ok"]["mates"]) for entry in entries) == 64


def test_sys_exit_fails_only_its_job() -> None:
    jobs = [shop.nasty.delay(text) for text in ("a", "exit", "b")]
    assert jobs[0].get(timeout=TIMEOUT_S) == "A"
    with pytest.raises(RuntimeError, match=r"called sys\.exit"):
        jobs[1].get(timeout=TIMEOUT_S)
    assert jobs[2].get(timeout=TIMEOUT_S) == "B"


def test_the_traceback_of_the_function_is_stored() -> None:
    job = shop.nasty.delay("raise")
    wait_for(job.ready, "job done")
    assert "in nasty" in str(job.traceback)


def test_the_stored_result_says_in_which_batch_the_job_was() -> None:
    an_hour_ago_s = time.time() - 3600
    headers = {"batchery_sent_at": an_hour_ago_s}
    job = shop.app.send_task(shop.shout.name, ["hello"], headers=headers)
    job.get(timeout=TIMEOUT_S)
    batch = shop.app.backend.get_task_meta(job.id)["batch"]
    assert batch["size"] >= 1
    assert batch["device"] == "cpu"
    assert batch["forward_ms"] >= 0
    # From sending, not from when a worker had room for it.
    assert batch["waited_ms"] >= 3_599_000


def test_inspect_stats_tells_of_batches_and_devices(worker: Worker) -> None:
    shop.shout.delay("x").get(timeout=TIMEOUT_S)

    def pool() -> Any:
        return worker.inspect(shop.app, "stats")["pool"]

    assert pool()["devices"]["cpu"]["state"] == "ready"
    # Its caller may have the result before it is counted.
    wait_for(lambda: pool()["batches"]["jobs"] > 0, "it is counted")


def test_a_client_that_has_no_batchery_submits_and_reads(redis_url: str) -> None:
    program = textwrap.dedent(
        f"""
        import sys
        class Block:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0].startswith("batchery"):
                    raise ImportError(name)
        sys.meta_path.insert(0, Block())
        from celery import Celery
        app = Celery(broker=sys.argv[1], backend=sys.argv[1])
        print(app.send_task("apps.shop.shout", ["hello"]).get(timeout={TIMEOUT_S}))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, redis_url], capture_output=True, text=True, check=True
    )
    assert done.stdout == "HELLO\n"
