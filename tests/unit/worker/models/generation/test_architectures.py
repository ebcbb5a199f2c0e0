"""Every architecture writes what `generate` writes, with what generation configs ask for."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from batchery.errors import ModelLoadError
from batchery_worker.models.generation.rules import PROCESSORS
from support.tiny_models import CORPUS, Load
from support.tiny_writers import ENCODER_WRITERS, WRITERS, Driver, PlainWriter, save_writer

RULES: dict[str, Any] = {
    "no_repeat_ngram_size": 2,
    "suppress_tokens": list(range(100, 300)),
    "begin_suppress_tokens": list(range(300)),
    "bad_words_ids": [[80], [81, 82], *([each] for each in range(200, 260))],
    "sequence_bias": [[[each], 4.0] for each in range(60, 90)],
    "min_length": 15,
    "min_new_tokens": 12,
    "forced_bos_token_id": 70,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": [13, 1.5],
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 1.4,
    "encoder_no_repeat_ngram_size": 2,
    "remove_invalid_values": True,
    "renormalize_logits": True,
}

#: In so many parts each architecture has the rules: those of a part hold together.
PARTS = 3

PROMPTS = (*CORPUS, "a")


def test_every_processor_is_among_the_rules() -> None:
    assert RULES.keys() == PROCESSORS


@pytest.mark.parametrize("architecture", [*WRITERS, *ENCODER_WRITERS])
def test_texts_and_their_probabilities_are_those_of_generate(
    architecture: str, load: Load, tmp_path: Path
) -> None:
    folder = save_writer(tmp_path, architecture)
    file = folder / "generation_config.json"
    own = json.loads(file.read_text())
    has_encoder = architecture in ENCODER_WRITERS
    # Without an encoder, `generate` warns of those about its prompt, and makes none.
    hold = [name for name in RULES if has_encoder or not name.startswith("encoder_")]
    names = random.Random(architecture).sample(hold, len(hold))
    for part in range(PARTS):
        rules = {name: RULES[name] for name in names[part::PARTS]}
        file.write_text(json.dumps({**own, **rules}))
        # Prompts are longer than a step, and jobs more than slots, and than the cache has room for.
        room = {} if has_encoder else STEPS
        model, plain = load("generation", folder, slots=3, **room), PlainWriter(folder)
        outcomes = Driver(model).run(
            (prompt, prompt, {"max_new_tokens": 16, "logprobs": 3, **keywords(at)})
            for at, prompt in enumerate(PROMPTS)
        )
        for at, prompt in enumerate(PROMPTS):
            tokens, scores = plain.generate(prompt, 16, **keywords(at))
            found = outcomes[prompt]
            assert isinstance(found, dict), found
            told = found["logprobs"]
            assert found["text"] == plain.text(tokens), rules
            assert [each["id"] for each in told] == tokens
            for each, token, row in zip(told, tokens, scores.clamp(min=-9999.0), strict=True):
                assert each["logprob"] == pytest.approx(float(row[token]), abs=1e-3), rules
                likeliest = [value for _, _, value in each["top"]]
                assert likeliest == pytest.approx(row.topk(3).values.tolist(), abs=1e-3), rules


STEPS = {"max_batch_tokens": 12, "cache_tokens": 160}


def keywords(at: int) -> dict[str, Any]:
    """Every third job has a penalty of its own."""
    return {} if at % 3 else {"repetition_penalty": 1.3}


@pytest.mark.parametrize(
    "architecture", ["bloom", "diffllama", "doge", "gptj", "mpt", "nemotron", "stablelm"]
)
def test_those_that_cannot_share_steps_are_refused_at_load(
    architecture: str, load: Load, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be computed together|cannot be batched"):
        load("generation", save_writer(tmp_path, architecture), max_batch_tokens=12)
