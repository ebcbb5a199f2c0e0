"""What `batchery stats` makes of the answers of workers: JSON, and tables."""

import json
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from batchery.cli import stats
from batchery.cli.console import render
from batchery.cli.stats import draw
from batchery.cli.survey import Survey, name_tasks, queue_depths
from batchery.errors import SettingsError


def figures(*, clock_s: float = 1.0, jobs: int = 1, items: int = 1, **more: Any) -> dict[str, Any]:
    device = {"state": "ready", "pid": 7, "load_s": 1.5, "batches_in_flight": 2}
    batches = {
        "batches": jobs // 10,
        "jobs": jobs,
        "items": items,
        "waited_ms": 12.0 * jobs,
        "forward_ms": 9.0 * (jobs // 10),
        "tokens": 96 * items,
        "computed_tokens": 100 * items,
        **more.pop("batches", {}),
    }
    waits = {"waiting": 3, "oldest_waiting_s": 0.25, "queues": ["embed"]}
    return {"devices": {"cuda:0": device}, "clock_s": clock_s, "batches": batches, **waits, **more}


def survey(**workers: Any) -> Survey:
    return Survey(workers, {"embed": 1234}, oldest_s={"embed": 12.5})


NOW = survey(one=figures(clock_s=102.0, jobs=140, items=1500))
NO_BATCHES = survey(one={"error": "runs no batches"})


def drawn(now: Survey) -> list[str]:
    return [" ".join(line.split()) for line in render(draw(now), 200).splitlines()]


def test_the_report_is_json_with_queues() -> None:
    report = json.loads(json.dumps(NOW.report()))
    assert report["workers"]["one"]["batches"]["jobs"] == 140
    del report["workers"]
    assert report == {
        "queues": {"embed": 1234},
        "unserved": [],
        "dead_letters": None,
        "oldest_s": {"embed": 12.5},
    }
    assert NO_BATCHES.report()["workers"]["one"] == {"error": "runs no batches"}


def test_tables_show_the_figures_of_a_worker_and_the_queues() -> None:
    lines = drawn(replace(NOW, unserved={"embed"}))
    done = "jobs 140, items 1,500, batches 14, batch size 107.1, padding waste 4.0 %"
    assert {
        "device cuda:0 ready, pid 7, load 1.5 s, batches in flight 2",
        "waiting here waiting 3, oldest waiting 0.2 s",
        f"done {done}",
        "a batch took waited 12.0 ms, forward 9.0 ms",
        "embed 1,234 no worker serves it",
    } <= set(lines), lines
    before_the_first = drawn(survey(one=figures(jobs=0, items=0, waiting=0, oldest_waiting_s=None)))
    assert {"waiting here -", "done -", "embed 1,234"} <= set(before_the_first)


def test_tables_show_models_costs_reasons_and_caches() -> None:
    model = {"max_batch_tokens": 2048, "chosen_by": "memory", "out_of_memory": 3, "why": "pinned"}
    slots = {"slots": 8, "slots_taken": 2, "steps": 1000, "step_ms": 4.0, "version": "v2"}
    aside = {"state": "not loaded", "held_bytes": 3 << 20, "loads": 2, "load_s": 4.1}
    device = {
        "state": "ready",
        "batches_in_flight": 0,
        "resident_kib": 2048,
        "memory": {"reserved_bytes": 6 << 30, "peak_bytes": 5 << 30},
        "models": {"embed": model, "chat": slots, "topics": aside},
    }
    cache = {"items": 1000, "hits": 850, "deduplicated": 50}
    told = figures(
        devices={"cuda:0": device, "cuda:1": {**device, "state": "given up", "error": "no driver"}},
        costs={"embed": {"item_us": 512.25, "pass_ms": 3.125, "error": 0.0821, "batches": 2048}},
        batches={
            "caches": {"embed": {**cache, "errors": 2, "error": "OOM"}},
            "tracer_jobs": {"link_error": 1200},
        },
    )
    text = "\n".join(drawn(survey(one=told)))
    for fact in (
        "ready, resident 2.0 MiB, reserved 6,144.0 MiB, peak 5,120.0 MiB",
        "max batch tokens 2,048, chosen by memory, out of memory 3, pinned",
        "slots taken 2, slots 8, steps 1,000, step 4.0 ms, version v2",
        "not loaded, held 3.0 MiB, loads 2, load 4.1 s",
        "given up, no driver, ",
        ", restart its worker when it is mended",
        "pass 3.1 ms, item 512.2 µs, error 8.2 %, batches 2,048",
        "hit rate 90.0 %, items 1,000, hits 850, deduplicated 50, errors 2, OOM",
        "by the tracer 1,200: link_error",
    ):
        assert fact in text, text


def test_who_gives_no_figures_is_named_with_the_reason() -> None:
    odd = survey(two={"error": "lives, and has not answered"}, odd={"batches": "many"})
    assert {
        "two: lives, and has not answered",
        "odd: answers with something else",
    } <= set(drawn(odd))
    assert any(line.startswith("no worker answers") for line in drawn(survey()))


def test_dead_letters_have_a_line() -> None:
    assert "dead letters: 1,234; see `batchery dead list`" in drawn(Survey({}, {}, 1234))
    assert not any("dead" in line for line in drawn(Survey({}, {}, 0)))


def test_a_message_names_the_nearest_task_first_and_not_too_many() -> None:
    assert name_tasks("embd", ["embed", "pay"]).startswith("did you mean 'embed'? there are embed,")
    assert "and 12 more" in name_tasks("x", [f"task{number}" for number in range(20)])
    assert name_tasks("x", []) == "there are none"


def test_queue_depths_count_messages_and_create_nothing() -> None:
    with Celery(broker="memory://", set_as_current=False) as app:
        for number in range(3):
            app.send_task("embed", [f"text {number}"], queue="embed-of-test")
        for _ in range(2):
            depths = queue_depths(app, {"nobody-of-test", "embed-of-test"})
            assert depths == {"embed-of-test": 3, "nobody-of-test": 0}


@pytest.mark.parametrize("seconds", ["inf", "-1"])
def test_a_look_takes_a_time_that_has_an_end(seconds: str) -> None:
    result = CliRunner().invoke(stats.stats, ["--timeout", seconds])
    assert (result.exit_code, "Invalid value for '--timeout'" in result.output) == (2, True)


def test_settings_that_cannot_be_read_are_the_error_and_no_other_broker_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read() -> dict[str, Any]:
        raise SettingsError("setting models.embed.kind = 'embeding'")

    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    app = Celery("models", set_as_current=False)
    app.add_defaults(read)
    monkeypatch.setattr(stats, "load_app", lambda *_: app)
    ended = CliRunner().invoke(stats.stats, [])
    assert isinstance(ended.exception, SettingsError)
