"""Texts of jobs that share their steps: the same as each alone, whatever its neighbours do."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchery import Generation
from batchery.errors import InvalidItem, ModelLoadError, OutOfMemory
from batchery.execution.steps import run_steps
from batchery.model import GOES_ON
from batchery.outcomes import Failed
from batchery_worker.models.generation import paged_batch
from batchery_worker.models.generation.prompts import Prompts, make_decoder, read_bytes
from batchery_worker.models.inputs import read_item
from support.tiny_models import CORPUS, Build, Load
from support.tiny_writers import (
    ENCODER_WRITERS,
    Driver,
    make_byte_tokenizer,
    make_prompts,
    save_writer,
)

PROMPTS = make_prompts(12)


def refusal(outcome: Any) -> str:
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.exception, InvalidItem)
    return str(outcome.exception)


@pytest.mark.parametrize("architecture", ["llama", *ENCODER_WRITERS])
def test_jobs_with_cancels_between_write_what_generate_writes_one_by_one(
    architecture: str, writer: Load
) -> None:
    model, plain = writer(architecture)
    choose = random.Random(3)
    jobs = [(prompt, choose.randint(1, 8)) for prompt in make_prompts(60)]
    driver = Driver(model)
    cancelled = set(choose.sample(range(60), 6))
    waiting = list(enumerate(jobs))
    choose.shuffle(waiting)
    while waiting or driver.running:
        while waiting and driver.free:
            name, (prompt, count) = waiting.pop()
            driver.join(name, prompt, max_new_tokens=count)
        driver.step()
        for name in cancelled.intersection(driver.running.values()):
            if choose.random() < 0.3:
                driver.leave(name)
    for name, (prompt, count) in enumerate(jobs):
        if name in driver.outcomes:
            tokens = plain.write(prompt, count)
            outcome = driver.outcomes[name]
            assert outcome["text"] == plain.text(tokens)
            assert outcome["tokens_out"] == len(tokens)
            assert outcome["tokens_in"] == len(plain.tokenizer(prompt)["input_ids"])
            assert "".join(piece["text"] for piece in driver.pieces[name]) == outcome["text"]
    assert 54 <= len(driver.outcomes) < 60
    assert not model._texts
    assert not model._jobs


def test_result_has_the_public_type(writer: Load) -> None:
    model, plain = writer("llama")
    result = Generation.model_validate(Driver(model).one(CORPUS[0], max_new_tokens=5))
    assert result.tokens_in == len(plain.tokenizer(CORPUS[0])["input_ids"])
    assert (result.finish_reason, result.tokens_out) == ("length", 5)
    assert 0 < result.timings.first_token_ms <= result.timings.total_ms


def test_pieces_are_made_for_those_who_read_them(writer: Load) -> None:
    model, _ = writer("llama")
    read, unread = Driver(model), Driver(model)
    text = read.one(CORPUS[0], max_new_tokens=5)["text"]
    model.is_streamed = False
    try:
        assert unread.one(CORPUS[0], max_new_tokens=5)["text"] == text
    finally:
        model.is_streamed = True
    assert read.pieces["one"]
    assert not unread.pieces["one"]


def test_every_step_gives_a_sign_of_life_though_nobody_reads_pieces(writer: Load) -> None:
    model, _ = writer("llama", max_batch_tokens=16)
    # It is read in several steps.
    (prepared,) = model.preprocess([" ".join(CORPUS)], max_new_tokens=5, ignore_eos=True)
    model.is_streamed = False
    try:
        model.join(0, prepared, ())
        told = [model.step()]
        while told[-1][-1].outcome is GOES_ON:
            told.append(model.step())
    finally:
        model.is_streamed = True
    assert len(told) > 5
    assert {(each.slot, each.piece) for step in told for each in step} == {(0, None)}


def test_seed_draws_the_same_text_whatever_the_neighbours_are(writer: Load) -> None:
    model, _ = writer("llama")
    keywords: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_new_tokens": 12}
    for more in ({}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.3}):
        alone = Driver(model).one(CORPUS[1], **keywords, **more)
        noise = [{"temperature": 2.0}, {"top_k": 3, "temperature": 0.5}, {"logprobs": 2}, {"n": 2}]
        jobs: Iterator[Any] = iter(
            [
                *((number, each, noise[number % 4]) for number, each in enumerate(make_prompts(8))),
                ("same", CORPUS[1], {**keywords, **more}),
            ]
        )
        assert Driver(model).run(jobs)["same"]["text"] == alone["text"]
    other = Driver(model).one(CORPUS[1], **{**keywords, "seed": 8})
    assert other["text"] != Driver(model).one(CORPUS[1], **keywords)["text"]


def test_prompts_have_steps_of_their_own_and_others_every_second_one(writer: Load) -> None:
    model, _ = writer("llama", slots=4, max_batch_tokens=40)
    driver = Driver(model)

    def written() -> dict[Any, int]:
        return {driver.running[slot]: len(job.texts[0].tokens) for slot, job in model._jobs.items()}

    driver.join("first", CORPUS[0], max_new_tokens=30)
    driver.step()
    driver.step()
    assert written() == {"first": 2}
    driver.join("second", CORPUS[1], max_new_tokens=30)
    driver.step()
    assert written() == {"first": 2, "second": 1}
    for number in range(6):
        driver.join(number, CORPUS[2], max_new_tokens=1)
        driver.step()
        assert number in driver.outcomes
    assert written() == {"first": 5, "second": 4}
    # One that is too long for a step is read beside the others.
    driver.join("long", " ".join(CORPUS), max_new_tokens=1)
    driver.step()
    assert written() == {"first": 6, "second": 5, "long": 0}
    driver.step_until_idle()
    assert {"first", "second", "long"} < driver.outcomes.keys()


def test_stop_string_ends_the_text_and_is_never_shown(writer: Load) -> None:
    model, _ = writer("llama")
    text = Driver(model).one(CORPUS[0], max_new_tokens=20)["text"]
    stop = text[6:9]
    driver = Driver(model)
    result = driver.one(CORPUS[0], max_new_tokens=20, stop=["never so", stop])
    assert result["text"] == text[: text.index(stop)]
    assert result["finish_reason"] == "stop"
    assert "".join(piece["text"] for piece in driver.pieces["one"]) == result["text"]


def test_end_token_ends_the_text_unless_it_is_ignored(writer: Load) -> None:
    model, plain = writer("llama")
    written = plain.write(CORPUS[0], 5)
    end = written[3]
    usual, model._endings = model._endings, frozenset([end])
    try:
        result = Driver(model).one(CORPUS[0], max_new_tokens=9)
        assert (result["finish_reason"], result["tokens_out"]) == ("stop", 4)
        assert result["text"] == plain.text(written[:3])
        ignored = Driver(model).one(CORPUS[0], max_new_tokens=9, ignore_eos=True)
        assert (ignored["finish_reason"], ignored["tokens_out"]) == ("length", 9)
    finally:
        model._endings = usual


def test_n_texts_are_as_many_draws_and_their_pieces_say_which(writer: Load) -> None:
    model, _ = writer("llama")
    driver = Driver(model)
    result = driver.one(CORPUS[3], n=20, temperature=1.0, seed=1, max_new_tokens=6)
    texts = [choice["text"] for choice in Generation.model_validate(result).model_dump()["choices"]]
    assert len(texts) == 20
    assert len(set(texts)) > 10
    for number, text in enumerate(texts):
        own = [piece for piece in driver.pieces["one"] if piece["choice"] == number]
        assert "".join(piece["text"] for piece in own) == text
        ends = [at for at, piece in enumerate(own, 1) if "finish_reason" in piece]
        assert ends == [len(own)]
    assert result["tokens_out"] <= 120


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Oslo"}', "{'city': 'Oslo'}"),
        ({"city": "Oslo"}, "{'city': 'Oslo'}"),
        ("", "{}"),
        ("Oslo", "Oslo"),
        ("[1]", "[1]"),
        ('{"a":' * 300 + "1" + "}" * 300, '{"a":' * 300 + "1" + "}" * 300),
    ],
)
def test_arguments_of_a_call_in_the_history_reach_the_template_as_an_object(
    arguments: Any, shown: str
) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{{ messages[1].tool_calls[0].function.arguments }}"
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    tokens = Prompts(tokenizer, 1000, 10_000).read(read_item(messages))
    assert make_decoder(tokenizer)(tokens) == shown
    assert function["arguments"] == arguments


def test_bytes_of_parts_of_characters_are_those_of_the_tokens(writer: Load) -> None:
    model, _ = writer("llama")
    tokenizer = model.tokenizer
    for token in range(len(tokenizer)):
        shown = tokenizer.decode([token])
        found = read_bytes(tokenizer, token, shown)
        if token not in tokenizer.all_special_ids:
            assert found is not None
            assert bytes(found).decode(errors="replace") == shown
    whole = tokenizer("Zürich 日本 🙂", add_special_tokens=False)["input_ids"]
    parts = [read_bytes(tokenizer, token, tokenizer.decode([token])) or [] for token in whole]
    assert b"".join(map(bytes, parts)).decode() == "Zürich 日本 🙂"
    assert len(parts) > len("Zürich 日本 🙂")
    result = Driver(model).one(CORPUS[0], logprobs=20, max_new_tokens=20, temperature=2.0, seed=1)
    noted = [each for each in result["logprobs"] if "bytes" in each]
    assert noted
    for each in noted:
        shown = [each["token"], *(top[0] for top in each["top"])]
        assert [bytes(found).decode(errors="replace") for found in each["bytes"]] == shown


@pytest.mark.parametrize("architecture", ["llama", *ENCODER_WRITERS])
def test_resumed_jobs_go_on_behind_their_pieces_beside_new_ones(
    architecture: str, writer: Load
) -> None:
    model, _ = writer(architecture)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1}]
    jobs = [(each, {"max_new_tokens": 14, **kinds[at % 2]}) for at, each in enumerate(PROMPTS)]
    whole, again = Driver(model), Driver(model)
    whole.run((number, prompt, keywords) for number, (prompt, keywords) in enumerate(jobs))
    for number, (prompt, keywords) in enumerate(jobs):
        again.join(number, prompt, whole.pieces[number][: number * 2], **keywords)
    again.step_until_idle()
    for number, expected in whole.outcomes.items():
        resumed, known = again.outcomes[number], whole.pieces[number][: number * 2]
        timings = resumed.pop("timings")
        came = round(timings["tokens_per_s"] * timings["total_ms"] / 1e3)
        assert came == resumed["tokens_out"] - sum(len(piece["tokens"]) for piece in known)
        del expected["timings"]
        for each in [*expected.get("choices", ()), *resumed.get("choices", ())]:
            assert all(token["logprob"] <= 0 for token in each.pop("logprobs"))
        assert resumed == expected
        for choice in (0, 1):
            texts = [
                "".join(each["text"] for each in several if each.get("choice", 0) == choice)
                for several in ([*known, *again.pieces[number]], whole.pieces[number])
            ]
            assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", ["llama", "t5"])
def test_memory_that_runs_out_in_a_step_costs_no_job(
    architecture: str, writer: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = writer(architecture, slots=5)
    kind = type(model._batch)
    compute, steps, before = kind.forward, iter(range(1000)), model._batch.size

    def forward(batch: Any) -> Any:
        computed = compute(batch)
        if next(steps) in (3, 7):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return computed

    monkeypatch.setattr(kind, "forward", forward)
    prompts = make_prompts(12)
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 9}) for each in prompts)
    for prompt in prompts:
        assert outcomes[prompt]["text"] == plain.text(plain.write(prompt, 9))
    assert model._batch.size != before


def test_job_that_was_read_before_the_cache_became_smaller_fills_the_new_one(
    load: Load, tmp_path: Path
) -> None:
    model = load("generation", save_writer(tmp_path / "writer"), cache_tokens=160)
    (prepared,) = model.preprocess([CORPUS[0]], ignore_eos=True)
    while model._batch.capacity > 64:
        assert model._batch.shrink(64)
    (result,) = run_steps(model, [prepared], {})
    assert result["finish_reason"] == "length"
    assert result["tokens_in"] + result["tokens_out"] == model._batch.capacity


def test_job_that_has_no_memory_alone_fails_and_the_next_one_runs(
    writer: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = writer("llama", slots=3, cache_tokens=512)

    def forward(batch: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(paged_batch.PagedBatch, "forward", forward)
        driver = Driver(model)
        failed = driver.one(CORPUS[0], max_new_tokens=4)
        assert isinstance(failed.exception, OutOfMemory)
        # With several, the process ends, and they run again in smaller groups.
        driver.join("a", "some")
        driver.join("b", "more")
        with pytest.raises(MemoryError):
            driver.step_until_idle()
    model._jobs.clear()
    model._batch.build()
    assert Driver(model).one(CORPUS[0], max_new_tokens=4)["text"] == plain.text(
        plain.write(CORPUS[0], 4)
    )


@pytest.mark.parametrize(
    ("item", "keywords", "says"),
    [
        ("", {}, "item: must be a prompt, or the messages of a chat, and not empty"),
        (7, {}, "item.prompt: Input should be a valid string"),
        ([1, 100_000], {}, "token ids: 100000 at position 1"),
        ("a " * 400, {}, "are more than max_length = 160"),
        ("a b", {"max_new_tokens": 500}, "max_length = 160; send fewer, or ask for fewer new ones"),
        ({"messages": []}, {}, "item: must be a prompt, or the messages of a chat, and not"),
        ({"prompt": "a", "echo": True}, {}, "item.echo: no such field"),
        ({"prompt": "a", "n": 2}, {}, "options are keywords of the call"),
        ({"prompt": "a", "options": {"n": 0}}, {}, "keyword n = 0"),
        ([{"role": "asistant", "content": "a"}], {}, "messages[0].role = 'asistant': there are"),
        ([{"role": "developer", "content": "a"}], {}, "refuses them: no developer here"),
        ([{"role": "user"}], {}, "messages[0].content: must be a text, not NoneType"),
        (["a"], {}, "token ids: position 0 has a str"),
        ("a", {"temperatur": 1}, "keyword temperatur: no such keyword"),
        ("a", {"temperature": -1}, "keyword temperature = -1"),
        ("a", {"top_p": 0}, "keyword top_p = 0"),
        ("a", {"n": 1000}, "keyword n = 1000"),
        ("a", {"stop": [""]}, "keyword stop = '': String should have at least 1 character"),
        ("a", {"stop": ["b"] * 17}, "List should have at most 16 items"),
        ("a", {"stop": 3}, "keyword stop = 3: Input should be a valid string"),
        ("a", {"logprobs": 1000}, "keyword logprobs = 1000"),
    ],
)
def test_bad_input_is_refused_by_name(
    item: Any, keywords: dict[str, Any], says: str, writer: Load
) -> None:
    model, _ = writer("llama")
    assert says in refusal(Driver(model).one(item, **keywords))


def test_chat_goes_through_the_template_of_the_model(writer: Load) -> None:
    model, plain = writer("llama")
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "!"}],
        }
    ]
    expected = "[tools 1] user : rain! [SEP] assistant : "
    chat = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    (prepared,) = model.preprocess([chat])
    assert prepared.tokens == plain.tokenizer(expected)["input_ids"]
    assert Driver(model).one(messages, max_new_tokens=3)["tokens_out"] == 3


def test_chat_without_a_template_is_refused(load: Load, tmp_path: Path) -> None:
    folder = save_writer(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    model = load("generation", folder)
    problem = refusal(Driver(model).one([{"role": "user", "content": "a"}]))
    assert problem == "messages: the model has no chat template; send a prompt"


def test_models_that_write_no_texts_are_refused(build: Build, load: Load) -> None:
    for architecture, kind in (("bert", "BertModel"), ("llama", "LlamaModel"), ("t5", "T5Model")):
        with pytest.raises(ModelLoadError, match=f"is a {kind}, and generation takes models that"):
            load("generation", build(architecture))


@pytest.mark.parametrize("architecture", ["llama", "bart"])
def test_output_that_is_not_finite_fails_its_job_alone(
    architecture: str, load: Load, tmp_path: Path
) -> None:
    model = load("generation", save_writer(tmp_path, architecture))
    weights = model.model.get_input_embeddings().weight
    if architecture == "bart":
        # Padding of the others is there as well.
        weights = model.model.get_encoder().embed_positions.weight
    with torch.no_grad():
        weights[60] = float("nan")
    jobs = [("bad", [60] * 70, {}), ("good", [6, 7], {"max_new_tokens": 1})]
    outcomes = Driver(model).run(iter(jobs))
    assert "not finite" in str(outcomes["bad"].exception)
    assert outcomes["good"]["tokens_out"] == 1
