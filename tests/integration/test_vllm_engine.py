"""The engine `vllm` of the kind `generation`, beside transformers' own `generate`."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from celery import Celery

from batchery.errors import BatcheryError, InvalidItem, ModelLoadError, PromptTooLong
from batchery.settings import ModelSettings
from batchery_worker.models.openai_server.vllm_server import VllmModel
from conftest import StartWorker
from support.harness import wait_ended, wait_for
from support.patience import patient
from support.step_driver import StepDriver, find_errors
from support.tiny_writers import PlainWriter, make_prompts, save_writer

#: The Python that has vLLM; `make test-vllm` sets it.
PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")

# An engine takes half a minute to start.
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="vLLM has an environment of its own: make test-vllm"),
    pytest.mark.timeout(patient(600)),
]

#: Starts an engine: `load_vllm(slots=2, engine_options={...})`.
LoadVllm = Callable[..., VllmModel]

#: They keep the start short, and the memory small.
OPTIONS = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}

SCHEMA = {
    "type": "object",
    "properties": {"sea": {"enum": ["north", "south"]}, "wet": {"type": "boolean"}},
    "required": ["sea", "wet"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention needs heads of at least 32 numbers.
    folder = tmp_path_factory.mktemp("llama")
    sizes: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 128}
    return save_writer(folder, **sizes, initializer_range=0.3)


@pytest.fixture(scope="module")
def load_vllm(llama: Path) -> Iterator[LoadVllm]:
    loaded = []

    def load(**settings: Any) -> VllmModel:
        options = {**OPTIONS, **settings.pop("engine_options", {})}
        chosen = {"model": str(llama), "engine_python": PYTHON, "dtype": "fp32", **settings}
        model = VllmModel(
            ModelSettings(kind="generation", engine="vllm", engine_options=options, **chosen)
        )
        model.load("cpu")
        loaded.append(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        # The first job with logprobs would wait a minute for a compiler.
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield load
    for model in loaded:
        model.unload()


@pytest.fixture(scope="module")
def engine(load_vllm: LoadVllm) -> VllmModel:
    return load_vllm(slots=8, max_new_tokens=40)


@pytest.fixture
def driver(engine: VllmModel) -> Iterator[StepDriver]:
    driver = StepDriver(engine)
    yield driver
    for slot in driver.pieces.keys() - driver.outcomes.keys():
        engine.leave(slot)


@pytest.fixture(scope="module")
def plain(llama: Path) -> PlainWriter:
    return PlainWriter(llama)


def test_greedy_tokens_equal_those_of_transformers_while_jobs_join_and_leave(
    driver: StepDriver, engine: VllmModel, plain: PlainWriter
) -> None:
    jobs = [(prompt, 1 + at % 40) for at, prompt in enumerate(make_prompts(60))]
    left, slots = set(), {}
    for number, (prompt, new_tokens) in enumerate(jobs):
        # More than the slots of the engine, which must not matter.
        slots[number] = driver.join(prompt, max_new_tokens=new_tokens)
        driver.step()
        if number % 7 == 3 and slots[number] not in driver.outcomes:
            engine.leave(slots[number])
            driver.outcomes[slots[number]] = None
            left.add(number)
    driver.wait()
    assert left
    ends = set()
    for number, (prompt, new_tokens) in enumerate(jobs):
        if number in left:
            continue
        result, expected = driver.outcomes[slots[number]], plain.write(prompt, new_tokens)
        # vLLM leaves out a character that is not complete at the end.
        text = plain.text(expected).rstrip("\ufffd")
        assert (
            result["text"].rstrip("\ufffd") == driver.text(slots[number]).rstrip("\ufffd") == text
        )
        assert result["tokens_out"] == len(expected)
        assert result["finish_reason"] == ("stop" if expected[-1] == 1 else "length")
        ends.add(result["finish_reason"])
    assert ends == {"stop", "length"}


def test_stop_strings_and_log_probabilities_are_those_of_the_model(
    driver: StepDriver, plain: PlainWriter
) -> None:
    tokens = plain.write("a dog barked", 30)
    whole = plain.text(tokens)
    stop = whole[12:17]
    result = driver.run("a dog barked", max_new_tokens=30, stop=["never there", stop], logprobs=3)
    assert result["text"] == driver.text(0) == whole[: whole.index(stop)]
    assert result["finish_reason"] == "stop"
    ids = plain.tokenizer("a dog barked").input_ids
    logits = plain.model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    rows = logits.log_softmax(-1).detach()
    assert len(result["logprobs"]) > 3
    for entry, token, row in zip(result["logprobs"], tokens, rows, strict=False):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-3)
        assert len(entry["top"]) in (2, 3)


def test_seed_draws_the_same_texts_and_n_draws_several(driver: StepDriver) -> None:
    keywords: dict[str, Any] = {
        "max_new_tokens": 20,
        "temperature": 1.5,
        "top_p": 0.9,
        "min_p": 0.01,
    }
    first, second = (driver.run("ships", seed=5, n=3, **keywords) for _ in range(2))
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 3
    assert first["tokens_out"] == 60
    assert driver.run("ships", seed=60, **keywords)["text"] not in texts
    for choice, text in enumerate(texts):
        assert text == "".join(p["text"] for p in driver.pieces[0] if p["choice"] == choice)


def test_chat_goes_through_the_template_of_the_model(
    driver: StepDriver, plain: PlainWriter
) -> None:
    result = driver.run({"messages": [{"role": "user", "content": "a cat"}]}, max_new_tokens=12)
    expected = plain.write("user : a cat [SEP] assistant : ", 12)
    assert result["text"] == plain.text(expected)


def test_resumed_job_goes_on_behind_its_pieces(driver: StepDriver) -> None:
    whole = driver.run("the river runs", max_new_tokens=40)
    for count in (1, 7, len(driver.pieces[0])):
        pieces = driver.pieces[0][:count]
        slot = driver.join("the river runs", pieces, max_new_tokens=40)
        (result,) = driver.wait(slot)
        assert "".join(each["text"] for each in pieces) + driver.text(slot) == whole["text"]
        assert (result["text"], result["tokens_out"]) == (whole["text"], whole["tokens_out"])


def test_structured_output_fits_its_schema(driver: StepDriver) -> None:
    structure = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    result = driver.run("weather:", max_new_tokens=120, response_format=structure)
    assert json.loads(result["text"]).keys() == {"sea", "wet"}
    assert result["finish_reason"] == "stop"
    assert driver.run("x", structured_outputs={"regex": "[ab]{4}c"})["text"][4:] == "c"


@pytest.mark.parametrize(
    ("item", "keywords", "kind", "words"),
    [
        ("x", {"temperature": -1.0}, InvalidItem, ["keyword temperature"]),
        ("x", {"best_of": 3}, InvalidItem, ["keyword best_of", "min_p"]),
        ("x", {"response_format": {"type": "xml"}}, InvalidItem, ["response_format"]),
        ("x", {"structured_outputs": {"regex": "a[b"}}, InvalidItem, ["a[b"]),
        ("x " * 300, {}, PromptTooLong, ["160"]),
        ([3, 100_000], {}, InvalidItem, ["100000"]),
    ],
)
def test_wrong_item_or_keyword_fails_alone_and_by_name(
    driver: StepDriver, item: Any, keywords: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    good = driver.join("the cat", max_new_tokens=30)
    with pytest.raises(kind) as caught:
        driver.run(item, **keywords)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not find_errors(driver.wait(good))


def test_death_of_the_engine_is_an_error_of_the_step_and_leaves_no_process(
    load_vllm: LoadVllm,
) -> None:
    model = load_vllm(slots=2)
    driver = StepDriver(model)
    front = psutil.Process(model._process.pid)
    family = [front, *front.children(recursive=True)]
    driver.join("a", max_new_tokens=140, ignore_eos=True)

    def step() -> bool:
        driver.step()
        return bool(driver.pieces[0])

    wait_for(step, "the text has begun")
    core = next(each for each in family if "EngineCore" in " ".join(each.cmdline()))
    core.kill()
    with pytest.raises(BatcheryError, match="engine vllm: its process has ended"):
        wait_for(lambda: step() and False, "a step fails")
    wait_ended(family, patient(30))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine_python": sys.executable}, ["No module named 'vllm'"]),
        ({"engine_options": {"max_model_length": 9}}, ["max-model-length"]),
        ({"engine_options": {"kv_cache_memory_bytes": 9}}, ["cache blocks"]),
    ],
    ids=["without-vllm", "unknown-option", "no-memory"],
)
def test_engine_that_does_not_start_says_why_in_one_line(
    load_vllm: LoadVllm, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelLoadError, match="does not start") as caught:
        load_vllm(**settings)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_jobs_of_an_engine_that_is_killed_run_again(
    start_worker: StartWorker, client: Celery, llama: Path, plain: PlainWriter, tmp_path: Path
) -> None:
    options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in OPTIONS.items())
    (tmp_path / "batchery.toml").write_text(
        f'[models.chat]\nkind = "generation"\nengine = "vllm"\nmodel = "{llama}"\ndtype = "fp32"\n'
        f'slots = 4\nengine_python = "{PYTHON}"\nengine_options = {{ {options} }}\n'
    )
    worker = start_worker("batchery.app", "-Q", "chat", cwd=tmp_path)
    chat = client.signature("chat", queue="chat")
    prompts = make_prompts(12)
    jobs = [chat.delay(prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts[:8]]
    family = worker.devices()[0].children(recursive=True)
    next(each for each in family if each.cmdline()[:1] == [PYTHON]).kill()
    jobs += [chat.delay(prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts[8:]]
    for prompt, job in zip(prompts, jobs, strict=True):
        result = job.get(timeout=patient(200))
        expected = plain.write(prompt, 120)
        text = plain.text(expected).rstrip("\ufffd")
        assert result["text"].startswith(text)
        assert expected[-1] == 1 or result["text"].rstrip("\ufffd") == text
    assert "engine vllm: its process has ended" in worker.log
    wait_ended(family, patient(30))
    again = worker.devices()[0].children(recursive=True)
    worker.process.kill()
    wait_ended(again, patient(30))
