"""Text generation behind a real worker: settings alone, calls of Celery, texts of `generate`."""

from pathlib import Path

import pytest
from celery import Celery

from batchery import Generation, InvalidItem
from conftest import StartWorker
from support.harness import Worker, wait_for
from support.patience import patient
from support.tiny_models import CORPUS
from support.tiny_writers import PlainWriter, make_prompts, save_writer

TIMEOUT_S = patient(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_writer(tmp_path_factory.mktemp("writer"))


@pytest.fixture(scope="module")
def worker(
    start_module_worker: StartWorker, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Worker:
    settings = tmp_path_factory.mktemp("settings")
    (settings / "batchery.toml").write_text(
        f'[models.chat]\nkind = "generation"\nmodel = "{folder}"\nslots = 5\n'
        "max_new_tokens = 10\ncache_tokens = 512\n"
    )
    return start_module_worker("batchery.app", "-Q", "chat", cwd=settings)


@pytest.mark.usefixtures("worker")
def test_jobs_of_a_queue_are_written_as_generate_writes_them(client: Celery, folder: Path) -> None:
    plain = PlainWriter(folder)
    prompts = make_prompts(40)
    chat = client.signature("chat", queue="chat")
    jobs = [chat.delay(prompt) for prompt in prompts]
    for prompt, job in zip(prompts, jobs, strict=True):
        result = Generation.model_validate(job.get(timeout=TIMEOUT_S))
        assert result.text == plain.text(plain.write(prompt, 10))


def test_tokens_and_times_of_texts_are_counted(worker: Worker, client: Celery) -> None:
    def count() -> dict[str, float]:
        texts = worker.inspect(client, "stats")["pool"]["batches"]["texts"].get("chat", {})
        return {
            name: sum(value.values()) if isinstance(value, dict) else value
            for name, value in texts.items()
        }

    chat = client.signature("chat", queue="chat")
    # A caller has its result before the worker has counted it.
    wait_for(lambda: worker.batches_in_flight(client) == 0, "earlier ones are counted")
    before = count()
    results = [chat.delay(prompt).get(timeout=TIMEOUT_S) for prompt in make_prompts(8)]
    counted = before.get("first_tokens", 0) + len(results)
    wait_for(lambda: count().get("first_tokens") == counted, "all are counted")
    gained = {name: value - before.get(name, 0) for name, value in count().items()}
    assert gained["tokens_in"] == sum(each["tokens_in"] for each in results)
    assert gained["tokens_out"] == sum(each["tokens_out"] for each in results)
    assert gained["pauses"] == sum(each["tokens_out"] > 1 for each in results)
    # Before they had a slot, they were sent.
    own_s = sum(each["timings"]["first_token_ms"] for each in results) / 1e3
    assert gained["first_tokens_s"] > own_s


@pytest.mark.usefixtures("worker")
def test_bad_jobs_fail_alone_with_the_error_that_says_why(client: Celery) -> None:
    chat = client.signature("chat", queue="chat")
    good = chat.delay(CORPUS[0], max_new_tokens=40)
    with pytest.raises(InvalidItem, match="keyword temperature = -1"):
        chat.delay(CORPUS[0], temperature=-1).get(timeout=TIMEOUT_S)
    with pytest.raises(InvalidItem, match="more than max_length = 160"):
        chat.delay("rain " * 300).get(timeout=TIMEOUT_S)
    with pytest.raises(InvalidItem, match=r"messages\[0\]\.role = 'boss'"):
        chat.delay([{"role": "boss", "content": "a"}]).get(timeout=TIMEOUT_S)
    assert good.get(timeout=TIMEOUT_S)["tokens_out"] == 40
