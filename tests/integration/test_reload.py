"""Models that are replaced while a real worker serves them."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result

from apps import shop
from batchery.cli.control import reload
from batchery.cli.explain import explain
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import TIMEOUT_S
from support.served_models import save_writer
from support.steady_callers import SteadyCallers
from support.tiny_models import save_model

#: How often the model is replaced under load.
RELOADS = 4

SETTINGS = """
[models.mood]
kind = "classification"
model = "{folder}/{version}"

[models.kept]
kind = "classification"
model = "{folder}/{version}"
cache = true

[models.chat]
kind = "generation"
model = "{folder}/writer"
slots = 4
cache_tokens = 4096
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions of a classifier, whose labels tell them apart, and other models."""
    folder = tmp_path_factory.mktemp("models")
    for version in "ab":
        save_model(folder / version, "bert", labels=(f"{version}0", f"{version}1"))
    save_writer(folder / "writer")
    write_settings(folder, "a")
    return folder


def write_settings(folder: Path, version: str) -> None:
    """From now on the classifiers are of this version."""
    (folder / "batchery.toml").write_text(SETTINGS.format(folder=folder, version=version))


@pytest.fixture(scope="module")
def worker(start_module_worker: StartWorker, folder: Path, client: Celery) -> Worker:
    queues = ("-Q", "mood,kept,chat")
    return start_module_worker("batchery.app", *queues, cwd=folder).wait_answers(client)


@pytest.fixture(autouse=True)
def _app(redis_url: str) -> None:
    shop.app.conf.update(broker_url=redis_url, result_backend=redis_url)


def run(command: Any, *arguments: object) -> Result:
    return CliRunner().invoke(command, [*map(str, arguments), "-A", "apps.shop"])


#: Loads a model of the worker anew, in this version.
Load = Callable[[str, str], Result]


@pytest.fixture
def load(worker: Worker, folder: Path) -> Load:
    def write_and_load(name: str, version: str) -> Result:
        write_settings(folder, version)
        # One that is named need not be looked for, which it must answer in time.
        return run(reload, name, "--worker", worker.name)

    return write_and_load


def send(client: Celery, task: str, item: Any, **keywords: Any) -> Any:
    return client.send_task(task, [item], keywords, queue=task)


def labels(client: Celery, jobs: list[Any]) -> dict[str, str]:
    """Version of the model -> that of its labels, of these jobs."""
    found: dict[str, str] = {}
    for job in jobs:
        label = job.get(timeout=TIMEOUT_S)["label"]
        batch = client.backend.get_task_meta(job.id)["batch"]
        assert found.setdefault(batch["version"], label[0]) == label[0]
    return found


def version_after(done: Result) -> str:
    assert done.exit_code == 0, done.output
    return done.output.partition(" is version ")[2].partition(",")[0]


@pytest.fixture
def steady(worker: Worker, client: Celery) -> Iterator[SteadyCallers]:
    """Asks for moods all the time; its answers are versions with those of their labels."""

    def call() -> Iterable[tuple[str, str]]:
        jobs = [send(client, "mood", f"text {number}") for number in range(8)]
        return labels(client, jobs).items()

    with SteadyCallers(call, threads=2) as made:
        yield made


def test_a_model_is_replaced_under_load_again_and_again(
    worker: Worker, client: Celery, folder: Path, load: Load, steady: SteadyCallers
) -> None:
    for number in range(RELOADS):
        name = "ba"[number % 2]
        version = version_after(load("mood", name))
        # From now on there are only results of the new one.
        jobs = [send(client, "mood", f"after {number}.{n}") for n in range(3)]
        assert labels(client, jobs) == {version: name}
    steady.wait_more()
    assert sorted(label for _, label in set(steady.answers)) == ["a", "b"]
    done = run(explain, jobs[0].id)
    assert done.output.rstrip().endswith(f"version {version}")
    assert "device process for cpu died" not in worker.log
    # One for all models, and one for those with slots.
    wait_for(lambda: len(worker.devices()) == 2, "processes that were replaced have ended")


def test_a_version_that_does_not_fit_leaves_the_old_one(
    worker: Worker, client: Celery, folder: Path, load: Load, steady: SteadyCallers
) -> None:
    before = version_after(load("mood", "a"))
    done = load("mood", "nowhere")
    assert done.exit_code == 1
    assert "not reloaded, mood goes on as before: " in done.output
    assert "there is no such folder" in done.output
    assert len(done.output.splitlines()) == 1
    assert labels(client, [send(client, "mood", "x")]) == {before: "a"}
    # Settings that were broken meanwhile.
    (folder / "batchery.toml").write_text("[models.mood\n")
    done = run(reload, "mood", "--worker", worker.name)
    assert (done.exit_code, "not reloaded" in done.output) == (1, True)
    assert labels(client, [send(client, "mood", "x")]) == {before: "a"}


def test_results_that_are_kept_are_those_of_their_version(
    worker: Worker, client: Celery, folder: Path, load: Load
) -> None:
    for name in "abab":
        load("kept", name)
        first = send(client, "kept", "the same text").get(timeout=TIMEOUT_S)
        assert first["label"][0] == name
        assert send(client, "kept", "the same text").get(timeout=TIMEOUT_S) == first


def test_a_model_with_slots_is_not_loaded_twice(
    worker: Worker, client: Celery, folder: Path, load: Load
) -> None:
    before = {each.pid for each in worker.devices()}
    done = load("chat", "a")
    assert (done.exit_code, "restart the worker" in done.output) == (1, True)
    assert before == {each.pid for each in worker.devices()}
