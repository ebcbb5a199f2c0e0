"""A generation config holds as in `generate`, or the model is refused by the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from batchery.errors import ModelLoadError
from batchery_worker.models.generation.rules import KNOWN, REFUSED
from support.tiny_models import CORPUS, Load
from support.tiny_writers import Driver, make_byte_tokenizer, save_writer


@pytest.fixture(scope="module")
def ruled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Saves a tiny model whose generation config has these fields."""

    def save(**fields: Any) -> Path:
        folder = save_writer(tmp_path_factory.mktemp("ruled"))
        file = folder / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        return folder

    return save


@pytest.mark.parametrize(
    ("field", "value"),
    [("guidance_scale", 1.5), ("dola_layers", "high"), ("stop_strings", ["x"]), ("a_new_one", 0)],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    field: str, value: Any, ruled: Any, load: Load
) -> None:
    with pytest.raises(ModelLoadError, match=f"generation_config.json has {field} = "):
        load("generation", ruled(**{field: value}))


def test_another_way_to_generate_is_refused(ruled: Any, load: Load) -> None:
    folder = ruled()
    file = folder / "custom_generate" / "generate.py"
    file.parent.mkdir()
    file.write_text("def generate(model, **_):\n    return None\n")
    with pytest.raises(ModelLoadError, match=r"custom_generate/generate\.py writes"):
        load("generation", folder, trust_remote_code=True)


def test_every_field_of_the_installed_transformers_is_known() -> None:
    fields = vars(GenerationConfig()).keys()  # type: ignore[no-untyped-call]
    assert fields - KNOWN <= REFUSED.keys()


def test_an_end_token_that_is_not_special_is_not_shown(ruled: Any, load: Load) -> None:
    tokenizer = make_byte_tokenizer()
    end = tokenizer("e", add_special_tokens=False)["input_ids"][0]
    folder = ruled(eos_token_id=end, sequence_bias=[[[end], 50.0]], min_new_tokens=3)
    result = Driver(load("generation", folder)).one(CORPUS[0], max_new_tokens=9, logprobs=0)
    assert (result["finish_reason"], result["tokens_out"]) == ("stop", 4)
    written = [each["token"] for each in result["logprobs"]]
    assert written[-1] == "e"
    assert result["text"] == "".join(written[:-1])


def make_spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Words begin with their space, as with Llama 2, Gemma and Mistral."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["[UNK]", "[SEP]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[SEP]"
    )


def test_logprobs_tell_tokens_with_a_space_from_those_without(ruled: Any, load: Load) -> None:
    tokenizer = make_spaced_tokenizer()
    twins = [
        tokenizer.convert_tokens_to_ids(each)
        for each in ("\u2581a", "a", "\u2581t", "t", "\u2581the", "e")
    ]
    folder = ruled(sequence_bias=[[[each], 30.0] for each in twins])
    tokenizer.save_pretrained(folder)
    model = load("generation", folder)
    result = Driver(model).one(
        CORPUS[0], max_new_tokens=12, logprobs=5, ignore_eos=True, temperature=1.5, seed=5
    )
    told = result["logprobs"]
    assert "".join(each["token"] for each in told) == result["text"]
    assert any(each["token"].startswith(" ") for each in told)
    for each in told[1:]:
        shown = [name for name, _, _ in each["top"]]
        assert len(shown) == len(set(shown))
