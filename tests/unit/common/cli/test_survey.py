"""Rates from two surveys, and a survey as JSON and as tables."""

import io
import json
from typing import Any

from celery import Celery
from rich.console import Console

from batchery.cli.stats import dashboard
from batchery.cli.survey import DISCOVERY_S, Survey, WorkerDirectory, queue_depths


def figures(*, clock_s: float, jobs: int, items: int, **batches: Any) -> dict[str, Any]:
    return {
        "devices": {"cuda:0": {"state": "ready", "pid": 7, "load_s": 1.5, "batches_in_flight": 2}},
        "clock_s": clock_s,
        "waiting": 3,
        "oldest_waiting_s": 0.25,
        "queues": ["embed"],
        "batches": {
            "batches": (count := jobs // 10),
            "jobs": jobs,
            "items": items,
            "failed_jobs": 0,
            "device_restarts": 1,
            "waited_ms": 12.0 * jobs,
            "forward_ms": 9.0 * count,
            "prepare_ms": 1.2 * count,
            "queued_ms": 0.4 * count,
            "commit_ms": 3.6 * count,
            "tokens": 96 * items,
            "computed_tokens": 100 * items,
            "batch_sizes": {"<=1": 2, "<=64": 8},
            **batches,
        },
    }


def survey(**workers: Any) -> Survey:
    return Survey(workers, {"embed": 1234}, oldest_s={"embed": 12.5})


BEFORE = survey(one=figures(clock_s=100.0, jobs=100, items=1000))
NOW = survey(one=figures(clock_s=102.0, jobs=140, items=1500))


def drawn(now: Survey, before: Survey | None = None) -> str:
    file = io.StringIO()
    Console(file=file, width=120).print(dashboard(now, before))
    return file.getvalue()


def test_rates_are_growth_per_second_of_the_worker_s_clock() -> None:
    assert NOW.rates("one", BEFORE) == {
        "jobs_per_s": 20.0,
        "items_per_s": 250.0,
        "batches_per_s": 2.0,
        "failed_jobs_per_s": 0.0,
    }


def test_there_are_no_rates_without_an_earlier_survey() -> None:
    assert NOW.rates("one", None) is None
    assert NOW.rates("one", survey()) is None
    assert NOW.rates("another", BEFORE) is None


def test_there_are_no_rates_across_a_restart_of_the_worker() -> None:
    fewer = survey(one=figures(clock_s=105.0, jobs=3, items=30))
    earlier = survey(one=figures(clock_s=5.0, jobs=200, items=2000))
    assert fewer.rates("one", NOW) is None
    assert earlier.rates("one", NOW) is None


def test_a_worker_without_batches_has_no_rates() -> None:
    now = survey(one={"error": "pool runs no batches"})
    assert now.rates("one", BEFORE) is None
    assert now.report(BEFORE)["workers"]["one"] == {"error": "pool runs no batches"}


def test_dead_letters_are_shown_if_there_are_any() -> None:
    assert "dead letters" not in drawn(Survey({}, {}, 0))
    assert "dead letters: 1,234; see `batchery dead list`" in drawn(Survey({}, {}, 1234))


def test_the_report_is_json_with_rates_and_queues() -> None:
    report = json.loads(json.dumps(NOW.report(BEFORE)))
    assert report["workers"]["one"]["rates"]["items_per_s"] == 250
    assert report["workers"]["one"]["batches"]["jobs"] == 140
    assert report["queues"] == {"embed": 1234}
    assert report["dead_letters"] is None
    assert report["oldest_s"] == {"embed": 12.5}
    assert NOW.report()["workers"]["one"]["rates"] is None


def test_tables_show_all_figures_of_a_worker() -> None:
    text = drawn(NOW, BEFORE)
    for fact in (
        "cuda:0",
        "ready, pid 7, loaded in 1.5 s, batches in flight: 2",
        "3 jobs, oldest 0.2 s",
        "20.0 jobs/s, 250.0 items/s",
        "140 jobs, 1,500 items in 14 batches, 107.1 items each",
        "12.0 ms",
        "9.0 ms",
        "prepare 1.2 ms, between 0.4 ms, commit 3.6 ms",
        "4 %",
        "up to 64",
        "1,234",
    ):
        assert fact in text, text


def test_one_of_a_kind_is_no_plural() -> None:
    text = drawn(survey(one=figures(clock_s=1.0, jobs=1, items=1, batches=1)))
    assert "1 job, 1 item in 1 batch, 1.0 items each" in text, text


def test_models_and_memory_are_shown_if_a_device_reports_them() -> None:
    device = {"state": "ready", "pid": 7, "load_s": 1.5, "batches_in_flight": 0}
    model = {"max_batch_tokens": 16384, "chosen_by": "default", "out_of_memory": 0}
    poor = {"max_batch_tokens": 2048, "chosen_by": "memory", "out_of_memory": 3}
    told = {
        **device,
        "resident_kib": 2048,
        "models": {"embed": model, "large": {**poor, "peak_bytes": 5 << 20}},
        "memory": {"reserved_bytes": 6 << 30, "peak_bytes": 5 << 30},
    }
    now = survey(one={**figures(clock_s=1.0, jobs=1, items=1), "devices": {"cuda:0": told}})
    text = drawn(now)
    for fact in (
        "2 MiB of main memory, 6,144 MiB of the device, peak 5,120 MiB",
        "embed on cuda:0",
        "max_batch_tokens 16,384, chosen by default",
        "max_batch_tokens 2,048, chosen by memory, out of memory 3 times, peak 5 MiB",
    ):
        assert fact in text, text


def test_costs_of_a_forward_pass_are_shown_if_they_are_known() -> None:
    model = {"max_batch_tokens": 512, "chosen_by": "default", "out_of_memory": 0}
    costs = {"token_us": 51.25, "item_us": 0.0, "pass_ms": 1.625}
    recent = {"fitted_batches": 1024, "useful_items": 18}
    models = {"embed": {**model, **costs, **recent}, "other": model}
    device = {"state": "ready", "pid": 7, "load_s": 1.5, "batches_in_flight": 0, "models": models}
    now = survey(one={**figures(clock_s=1.0, jobs=1, items=1), "devices": {"cpu": device}})
    text = drawn(now)
    known = "51.2 µs per token, 0.0 µs per item, 1.62 ms per pass"
    assert f"{known}, by 1,024 batches; 18 items fill one" in text, text
    assert text.count("per token") == 1


def test_costs_of_a_batch_are_shown_for_each_task() -> None:
    costs = {"item_us": 512.25, "pass_ms": 3.125, "error": 0.0821, "batches": 2048}
    text = drawn(survey(one={**figures(clock_s=1.0, jobs=1, items=1), "costs": {"embed": costs}}))
    assert "batch of embed" in text
    known = "3.12 ms and 512.2 µs per item, off by 8 % on average, by 2,048 batches"
    assert known in text, text


def test_a_worker_before_its_first_batch_shows_dashes() -> None:
    fresh = figures(clock_s=1.0, jobs=0, items=0, batch_sizes={})
    text = drawn(survey(one={**fresh, "oldest_waiting_s": None}))
    assert "no batch yet" in text
    assert "oldest -" in text
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert {"waited -", "forward -", "padding waste -"} <= set(rows)


def test_reasons_for_the_tracer_are_shown_with_their_counts() -> None:
    slow = {"an overridden __call__": 1200, "chain": 3}
    text = drawn(survey(one=figures(clock_s=1.0, jobs=1, items=1, tracer_jobs=slow)))
    assert "by the tracer" in text
    assert "1,200: an overridden __call__" in text
    assert "3: chain" in text


def test_worker_without_answer_or_without_batches_is_named() -> None:
    text = drawn(survey(two={"error": "pool runs no batches"}), BEFORE)
    assert "one: no answer" in text
    assert "two: pool runs no batches" in text
    assert "no worker answers" in drawn(survey())


def test_queue_depths_count_messages_and_create_nothing() -> None:
    with Celery(broker="memory://", set_as_current=False) as app:
        for number in range(3):
            app.send_task("embed", [f"text {number}"], queue="embed-of-test")
        assert queue_depths(app, {"nobody-of-test", "embed-of-test"}) == {
            "embed-of-test": 3,
            "nobody-of-test": 0,
        }
        assert queue_depths(app, {"nobody-of-test"}) == {"nobody-of-test": 0}


def test_the_tables_show_what_each_cache_has_saved() -> None:
    cache = {
        "hit_rate": 0.9,
        "items": 1000,
        "hits": 850,
        "deduplicated": 50,
        "results": 1234,
        "bytes": 3 * 2**20,
        "errors": 0,
        "error": "",
    }
    failing = {**cache, "errors": 2, "error": "cannot be written: OOM"}
    caches = {"embed": cache, "mood": failing}
    text = drawn(survey(one=figures(clock_s=1.0, jobs=1, items=1, caches=caches)))
    saved = "90 % of 1,000 items not computed: 850 hits, 50 deduplicated; 1,234 results, 3 MiB"
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert f"cache of embed {saved}" in rows
    assert f"cache of mood {saved}; 2 errors, cannot be written: OOM" in " ".join(rows)
    assert "cache of" not in drawn(NOW)


class Broker:
    """An app, of which only remote control is asked; workers answer as they would."""

    def __init__(self) -> None:
        self.control = self
        self.asked: list[tuple[str, Any]] = []
        self.registered = {
            "stock@h": ["tasks.add"],
            "ours@h": ["tasks.add", "shout [is_installed=True]"],
            "forgot@h": ["shout [is_installed=False]"],
        }

    def broadcast(self, command: str, *, destination: Any, **_: Any) -> Any:
        self.asked.append((command, destination))
        if command == "registered":
            return [{name: tasks} for name, tasks in self.registered.items()]
        return [{name: {"batches": {}}} for name in destination]


def test_only_workers_with_batch_tasks_are_asked_and_newcomers_are_found() -> None:
    broker: Any = Broker()
    now_s = 0.0
    directory = WorkerDirectory(broker, lambda: now_s)
    answers = directory.ask(1.0)
    assert answers.keys() == {"ours@h", "forgot@h"}
    assert answers["ours@h"] == {"batches": {}}
    assert "batchery.install(app)" in answers["forgot@h"]["error"]
    directory.ask(1.0)
    assert broker.asked == [
        ("registered", None),
        ("batchery", ["ours@h"]),
        ("batchery", ["ours@h"]),
    ]
    broker.registered["new@h"] = ["shout [is_installed=True]"]
    now_s = DISCOVERY_S
    assert "new@h" in directory.ask(1.0)


def test_nobody_is_asked_where_nobody_has_batch_tasks() -> None:
    broker: Any = Broker()
    broker.registered = {"stock@h": ["tasks.add"]}
    assert WorkerDirectory(broker).ask(1.0) == {}
    assert broker.asked == [("registered", None)]


def test_an_answer_that_nobody_understands_is_named_and_has_no_figures() -> None:
    now = survey(one=figures(clock_s=1.0, jobs=1, items=1), odd={"batches": "many"})
    assert now.figures.keys() == {"one"}
    assert "odd: answers with something else" in drawn(now)


def test_figures_of_a_device_since_a_survey_are_those_that_it_gained() -> None:
    def device(batches: int, items: int) -> dict[str, Any]:
        done = {"batches": batches, "items": items, "tokens": 30, "computed_tokens": 40}
        return {"cpu": {"state": "ready", "batches_in_flight": 0, "done": done}}

    before = survey(one={**figures(clock_s=1.0, jobs=1, items=1), "devices": device(2, 10)})
    now = survey(one={**figures(clock_s=3.0, jobs=1, items=1), "devices": device(4, 40)})
    gained = now.since("one", before)
    assert gained is not None
    assert gained.clock_s == 2.0
    done = gained.devices["cpu"].done
    assert (done.items, done.mean_batch_size, done.padding_waste) == (30, 15.0, None)
    assert now.figures["one"].devices["cpu"].done.padding_waste == 0.25
    other = survey(one={**figures(clock_s=0.5, jobs=1, items=1), "devices": device(9, 90)})
    assert now.since("one", other) is not None
    assert "cpu" not in getattr(now.since("one", other), "devices", {})
