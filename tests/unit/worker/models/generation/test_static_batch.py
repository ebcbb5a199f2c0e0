"""Models with an encoder: texts of static batches are the same as each alone."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from batchery.errors import InvalidItem, ModelLoadError
from batchery_worker.models.generation.static_batch import StaticBatch
from support.tiny_models import CORPUS, Load
from support.tiny_writers import ENCODER_WRITERS, FORCED, Driver, make_prompts, save_writer


@pytest.mark.parametrize("architecture", sorted(ENCODER_WRITERS))
def test_jobs_with_cancels_between_write_what_generate_writes_one_by_one(
    architecture: str, writer: Load
) -> None:
    model, plain = writer(architecture)
    choose = random.Random(4)
    jobs = [(prompt, choose.randint(1, 12)) for prompt in make_prompts(40)]
    driver = Driver(model)
    cancelled = set(choose.sample(range(40), 6))
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
    texts = set()
    for name, outcome in driver.outcomes.items():
        prompt, count = jobs[name]
        tokens = plain.write(prompt, count)
        assert outcome["text"] == plain.text(tokens)
        assert outcome["tokens_out"] == len(tokens)
        assert outcome["tokens_in"] == len(plain.tokenizer(prompt)["input_ids"])
        assert "".join(piece["text"] for piece in driver.pieces[name]) == outcome["text"]
        texts.add(outcome["text"])
    assert 34 <= len(driver.outcomes) < 40
    # They are worth comparing.
    assert len(texts) > 15
    assert not model._texts
    assert not model._jobs


def test_rules_of_the_model_hold_as_in_generate(load: Load, writer: Load, tmp_path: Path) -> None:
    _, plain = writer("bart")
    tokens = plain.write(CORPUS[0], 6)
    assert [tokens[0], tokens[-1]] == [*FORCED.values()]
    folder = save_writer(tmp_path / "ruled", "bart")
    rules: dict[str, Any] = {"no_repeat_ngram_size": 2, "bad_words_ids": [[80], [81]]}
    model = load("generation", folder)
    for name, value in rules.items():
        setattr(model.model.generation_config, name, value)
    for prompt in make_prompts(8):
        ruled = plain.write(prompt, 30, repetition_penalty=1.5, **rules)
        result = Driver(model).one(prompt, max_new_tokens=30, repetition_penalty=1.5)
        assert result["text"] == plain.text(ruled)


def test_logprobs_of_impossible_tokens_are_numbers_of_json(writer: Load) -> None:
    model, _ = writer("bart")
    result = Driver(model).one(CORPUS[0], logprobs=2, max_new_tokens=6)
    values = [[value for _, _, value in each["top"]] for each in result["logprobs"]]
    assert [each["id"] for each in result["logprobs"]][-1] == FORCED["forced_eos_token_id"]
    assert values[-1] == [0.0, -9999.0]
    assert all(math.isfinite(value) for each in values for value in each)


@pytest.mark.parametrize("architecture", sorted(ENCODER_WRITERS))
def test_resumed_jobs_go_on_behind_their_pieces_beside_new_ones(
    architecture: str, writer: Load
) -> None:
    model, _ = writer(architecture)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1}]
    expected, again = Driver(model), Driver(model)
    for number, prompt in enumerate(make_prompts(12)):
        keywords = {"max_new_tokens": 14, **kinds[number % 2]}
        expected.join(number, prompt, **keywords)
    expected.step_until_idle()
    for number, prompt in enumerate(make_prompts(12)):
        keywords = {"max_new_tokens": 14, **kinds[number % 2]}
        again.join(number, prompt, expected.pieces[number][: number * 2], **keywords)
    again.step_until_idle()
    for number, whole in expected.outcomes.items():
        resumed = again.outcomes[number]
        for each in (whole, resumed):
            del each["timings"]
            for choice in each.get("choices", ()):
                del choice["logprobs"]
        assert resumed == whole
        pieces = [*expected.pieces[number][: number * 2], *again.pieces[number]]
        for choice in (0, 1):
            texts = [
                "".join(each["text"] for each in several if each.get("choice", 0) == choice)
                for several in (pieces, expected.pieces[number])
            ]
            assert texts[0] == texts[1]


def test_new_jobs_wait_for_the_batch_that_runs(writer: Load) -> None:
    model, plain = writer("t5")
    driver = Driver(model)
    driver.join("first", CORPUS[0], max_new_tokens=6, ignore_eos=True)
    driver.step()
    driver.join("second", CORPUS[1], max_new_tokens=1)
    while "first" not in driver.outcomes:
        assert "second" not in driver.outcomes
        driver.step()
    driver.step()
    assert driver.outcomes["second"]["text"] == plain.text(plain.write(CORPUS[1], 1))


def test_limits_hold_for_prompt_and_text_each(writer: Load) -> None:
    model, _ = writer("bart")
    assert Driver(model).one([5] * 80, max_new_tokens=80)["tokens_in"] == 80
    for item, count in (([5] * 81, 1), ([5], 81)):
        problem = Driver(model).one(item, max_new_tokens=count).exception
        assert isinstance(problem, InvalidItem)
        refused = f"prompt: {len(item)} tokens or {count} new ones are more than max_length = 80"
        assert refused in str(problem)


def test_memory_that_runs_out_in_a_step_costs_no_job(
    writer: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = writer("t5", slots=5)
    compute = StaticBatch.forward
    steps = iter(range(1000))

    def forward(batch: Any) -> Any:
        computed = compute(batch)
        if next(steps) in (3, 7):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return computed

    monkeypatch.setattr(StaticBatch, "forward", forward)
    prompts = make_prompts(12)
    outcomes = Driver(model).run((each, each, {"max_new_tokens": 9}) for each in prompts)
    for prompt in prompts:
        assert outcomes[prompt]["text"] == plain.text(plain.write(prompt, 9))
    assert model._batch.size == "batches of 2 texts"


def test_output_that_is_not_finite_fails_its_job_alone(load: Load, tmp_path: Path) -> None:
    model = load("generation", save_writer(tmp_path / "writer", "bart"))
    with torch.no_grad():
        # Padding of the others is there as well.
        model.model.get_encoder().embed_positions.weight[60] = float("nan")
    jobs = [("bad", [5] * 70, {}), ("good", [6, 7], {"max_new_tokens": 3})]
    outcomes = Driver(model).run(iter(jobs))
    assert "not finite" in str(outcomes["bad"].exception)
    assert outcomes["good"]["tokens_out"]


def test_settings_without_a_meaning_are_refused(load: Load, tmp_path: Path) -> None:
    folder = save_writer(tmp_path / "writer", "t5")
    with pytest.raises(ModelLoadError, match="cache_tokens has no meaning"):
        load("generation", folder, cache_tokens=512)
    folder = save_writer(tmp_path / "bare", "t5", decoder_start_token_id=None)
    with pytest.raises(ModelLoadError, match="no decoder_start_token_id"):
        load("generation", folder)
