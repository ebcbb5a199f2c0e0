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

from batchery.errors import BatcheryError, InvalidItem, ItemFailed, ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.models.generation.vllm_model import VllmModel
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
    return save_writer(folder, hidden_size=128, intermediate_size=128, initializer_range=0.3)


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
    return load_vllm(slots=8, cache_tokens=4096)


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
    assert len(left) > 4
    ends = set()
    for number, (prompt, new_tokens) in enumerate(jobs):
        if number in left:
            continue
        result, expected = driver.outcomes[slots[number]], plain.write(prompt, new_tokens)
        assert result["text"] == driver.text(slots[number]) == plain.text(expected)
        assert result["tokens_out"] == len(expected)
        assert result["finish_reason"] == ("stop" if expected[-1] == 1 else "length")
        ends.add(result["finish_reason"])
    assert ends == {"stop", "length"}


def test_stop_strings_end_a_text_and_are_withheld(driver: StepDriver, plain: PlainWriter) -> None:
    whole = plain.text(plain.write("a dog barked", 30))
    stop = whole[12:17]
    result = driver.run("a dog barked", max_new_tokens=30, stop=["never there", stop])
    assert result["text"] == driver.text(0) == whole[: whole.index(stop)]
    assert result["finish_reason"] == "stop"


def test_logprobs_are_those_of_the_model(driver: StepDriver, plain: PlainWriter) -> None:
    tokens = plain.write("rain falls", 6)
    result = driver.run("rain falls", max_new_tokens=6, logprobs=3)
    ids = plain.tokenizer("rain falls").input_ids
    logits = plain.model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    rows = logits.log_softmax(-1).detach()
    for entry, token, row in zip(result["logprobs"], tokens, rows, strict=True):
        assert entry["id"] == token
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-3)
        assert [each[1] for each in entry["top"]] == row.topk(3).indices.tolist()
        assert entry["top"][0][0] == plain.tokenizer.decode([entry["top"][0][1]])
    assert [each for piece in driver.pieces[0] for each in piece["logprobs"]] == result["logprobs"]


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
    assert driver.run("ships", seed=6, **keywords)["text"] not in texts
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
        assert driver.pieces[slot] == driver.pieces[0][count:]
        assert (result["text"], result["tokens_out"]) == (whole["text"], whole["tokens_out"])


def test_structured_output_fits_its_schema_also_when_it_is_resumed(driver: StepDriver) -> None:
    structure = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    result = driver.run("weather:", max_new_tokens=120, response_format=structure)
    value = json.loads(result["text"])
    assert value.keys() == {"sea", "wet"}
    assert result["finish_reason"] == "stop"
    slot = driver.join(
        "weather:", driver.pieces[0][:4], max_new_tokens=120, response_format=structure
    )
    (resumed,) = driver.wait(slot)
    assert resumed["text"] == result["text"]
    assert driver.pieces[slot] == driver.pieces[0][4:]
    assert driver.run("x", structured_outputs={"regex": "[ab]{4}c"})["text"][4:] == "c"


@pytest.mark.parametrize(
    ("item", "keywords", "words"),
    [
        ("x", {"temperature": -1.0}, ["keyword temperature"]),
        ("x", {"best_of": 3}, ["keyword best_of", "min_p"]),
        ("x", {"response_format": {"type": "xml"}}, ["response_format", "json_schema"]),
        ("x", {"structured_outputs": {"regex": "a[b"}}, ["vLLM", "a[b"]),
        ("x", {"structured_outputs": {"colour": "red"}}, ["structured_outputs", "colour"]),
        ("x " * 300, {}, ["prompt", "max_length = 160"]),
        ([{"role": "king", "content": "x"}], {}, ["role", "king"]),
        ([3, 100_000], {}, ["100000"]),
    ],
)
def test_wrong_item_or_keyword_fails_alone_and_by_name(
    driver: StepDriver, item: Any, keywords: dict[str, Any], words: list[str]
) -> None:
    good = driver.join("the cat", max_new_tokens=30)
    with pytest.raises(InvalidItem) as caught:
        driver.run(item, **keywords)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert not find_errors(driver.wait(good))


def test_drawn_structured_output_that_cannot_be_resumed_says_so(driver: StepDriver) -> None:
    structure: dict[str, Any] = {"structured_outputs": {"regex": "[a-z]{40}"}, "temperature": 2.0}
    driver.run("x", max_new_tokens=60, **structure)
    with pytest.raises(ItemFailed, match="set a seed"):
        driver.run("x", driver.pieces[0][:20], max_new_tokens=60, **structure)


def test_death_of_the_engine_is_an_error_of_the_step_and_leaves_no_process(
    load_vllm: LoadVllm,
) -> None:
    model = load_vllm(slots=2)
    driver = StepDriver(model)
    front = psutil.Process(model._engine.pid)
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
        ({"engine_python": None}, ["engine_python"]),
        ({"engine_python": "/nowhere/bin/python"}, ["/nowhere/bin/python", "there is no such"]),
        ({"engine_python": sys.executable}, ["does not start", "No module named 'vllm'"]),
        ({"engine_options": {"max_model_length": 9}}, ["max_model_length", "max_model_len"]),
        ({"engine_options": {"kv_cache_memory_bytes": 9}}, ["does not start", "cache blocks"]),
        ({"cache_tokens": 128}, ["cache_tokens = 128", "max_length = 160"]),
        ({"quantize": "int8"}, ["engine_options.quantization"]),
    ],
    ids=["unset", "missing", "without-vllm", "unknown-option", "no-memory", "cache", "quantize"],
)
def test_engine_that_does_not_start_says_why_in_one_line(
    load_vllm: LoadVllm, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_vllm(**settings)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1_000


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
    next(each for each in family if "vllm_child" in " ".join(each.cmdline()[:2])).kill()
    jobs += [chat.delay(prompt, max_new_tokens=120, ignore_eos=True) for prompt in prompts[8:]]
    for prompt, job in zip(prompts, jobs, strict=True):
        result = job.get(timeout=patient(200))
        expected = plain.write(prompt, 120)
        text = plain.text(expected)
        assert result["text"].startswith(text) if expected[-1] == 1 else result["text"] == text
    assert "engine vllm: its process has ended" in worker.log
    wait_ended(family, patient(30))
    again = worker.devices()[0].children(recursive=True)
    worker.process.kill()
    wait_ended(again, patient(30))
