"""Models with an encoder: texts of static batches are the same as each alone."""

import math
from pathlib import Path

import pytest

from batchery.errors import InvalidItem, ModelLoadError
from support.tiny_models import CORPUS, Load
from support.tiny_writers import FORCED, Driver, save_writer


def test_logprobs_of_impossible_tokens_are_numbers_of_json(writer: Load) -> None:
    model, _ = writer("bart")
    result = Driver(model).one(CORPUS[0], logprobs=2, max_new_tokens=6)
    values = [[value for _, _, value in each["top"]] for each in result["logprobs"]]
    assert [each["id"] for each in result["logprobs"]][-1] == FORCED["forced_eos_token_id"]
    assert values[-1] == [0.0, -9999.0]
    assert all(math.isfinite(value) for each in values for value in each)


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


def test_settings_without_a_meaning_are_refused(load: Load, tmp_path: Path) -> None:
    folder = save_writer(tmp_path / "writer", "t5")
    with pytest.raises(ModelLoadError, match="cache_tokens has no meaning"):
        load("generation", folder, cache_tokens=512)
    folder = save_writer(tmp_path / "bare", "t5", decoder_start_token_id=None)
    with pytest.raises(ModelLoadError, match="no decoder_start_token_id"):
        load("generation", folder)
