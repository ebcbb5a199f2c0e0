"""`batchery submit` of pictures: a folder, and a table as Hugging Face's data sets have it."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from celery import Celery

from batchery import install, submit_file
from batchery_producer.files import run as run_module
from conftest import StartWorker
from support.bulk_runs import read_rows
from support.harness import Worker
from support.patience import patient
from support.pictures import draw_many
from support.served_pictures import make_folder, make_variables

PICTURES = draw_many(40)

MAX_BYTES = 20_000


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory) -> Worker:
    folder = make_folder(tmp_path_factory.mktemp("pictures"))
    return start_module_worker("batchery.app", env=make_variables(folder, timeout_s=patient(60)))


@pytest.fixture
def app(redis_url: str, worker: Worker) -> Celery:
    made = Celery("a", broker=redis_url, backend=redis_url, set_as_current=False)
    return install(made, media={"max_bytes": MAX_BYTES})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    photos = tmp_path / "photos"
    for number, data in enumerate(PICTURES):
        path = photos / str(number % 3) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return photos


def submit(app: Celery, source: Path, output: Path, **options: Any) -> Any:
    options = {"queue": "see", "timeout_s": patient(60), **options}
    return submit_file(source, "see", output, app=app, **options)


def expected(client: Celery) -> list[Any]:
    jobs = [client.send_task("see", [each], queue="see") for each in PICTURES]
    return [job.get(timeout=patient(60))["vector"] for job in jobs]


def test_each_picture_of_a_folder_has_its_own_vector(
    app: Celery, client: Celery, folder: Path, tmp_path: Path
) -> None:
    (folder / "bad.jpg").write_bytes(b"none")
    (folder / "large.jpg").write_bytes(b"x" * (MAX_BYTES + 1))
    summary = submit(app, folder, tmp_path / "out.jsonl")
    assert (summary.succeeded, summary.failed) == (len(PICTURES), 2)
    vectors = {row["id"]: row["result"]["vector"] for row in read_rows(tmp_path / "out.jsonl")}
    for number, vector in enumerate(expected(client)):
        assert vectors[f"{number % 3}/{number}.png"] == pytest.approx(vector, abs=1e-5)
    errors = {row["id"]: row["error"] for row in read_rows(tmp_path / "out.errors.jsonl")}
    assert errors["bad.jpg"]["type"] == "InvalidItem"
    assert errors["large.jpg"] == {
        "type": "InvalidLine",
        "message": f"has more bytes than media.max_bytes = {MAX_BYTES}",
    }
    assert summary.first_failure.startswith(f"{folder}: ")


def test_few_bytes_are_in_flight_at_a_time_and_all_are_done(
    app: Celery, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "MAX_HELD_BYTES", 3 * max(map(len, PICTURES)))
    seen: list[int] = []
    summary = submit(
        app, folder, tmp_path / "out.jsonl", progress=lambda run: seen.append(run.in_flight)
    )
    assert summary.succeeded == len(PICTURES)
    # Small ones share the space; without a limit all would be in flight at once.
    assert 0 < max(seen) < len(PICTURES)


def test_a_run_that_was_stopped_goes_on_with_the_other_files(
    app: Celery, folder: Path, tmp_path: Path
) -> None:
    done = 0

    def note(run: Any) -> None:
        nonlocal done
        done = run.done

    options: dict[str, Any] = {"window": 4, "progress": note, "stop": lambda: done >= 5}
    first = submit(app, folder, tmp_path / "out.jsonl", **options)
    assert 5 <= first.succeeded < len(PICTURES)
    second = submit(app, folder, tmp_path / "out.jsonl", resume=True)
    assert first.succeeded + second.succeeded == len(PICTURES)
    rows = read_rows(tmp_path / "out.jsonl")
    assert len({row["id"] for row in rows}) == len(rows) == len(PICTURES)


@pytest.mark.usefixtures("worker")
def test_a_table_of_hugging_face_has_its_pictures_in_it(
    app: Celery, client: Celery, tmp_path: Path
) -> None:
    rows = [
        {"id": number, "image": {"bytes": data, "path": f"{number}.png"}, "label": "cat"}
        for number, data in enumerate(PICTURES)
    ]
    # A path without bytes is one of the worker's.
    rows.append({"id": 99, "image": {"bytes": None, "path": "one.png"}, "label": "dog"})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    summary = submit(app, tmp_path / "in.parquet", tmp_path / "out.jsonl")
    assert (summary.succeeded, summary.failed) == (len(rows), 0)
    vectors = {row["id"]: row["result"]["vector"] for row in read_rows(tmp_path / "out.jsonl")}
    for number, vector in enumerate(expected(client)):
        assert vectors[number] == pytest.approx(vector, abs=1e-5)
    assert vectors[99]
