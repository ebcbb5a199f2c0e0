"""`batchery tune`, with a model that needs no torch."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from batchery import Failed, InvalidItem, Model, StartError, install, register
from batchery_worker.cli import tune as command
from batchery_worker.cli.tune import tune

app = install(Celery("tuned", broker="memory://", set_as_current=False))


class Lengths(Model):
    def preprocess(self, items: Sequence[Any], *_: Any, **keywords: Any) -> Sequence[Any]:
        return [item if item != "bad" else Failed(InvalidItem("bad")) for item in items]

    def tokens(self, prepared: str) -> int:
        return len(prepared.split())

    def forward(self, batch: Sequence[str], *_: Any, **keywords: Any) -> Any:
        return [len(text) for text in batch]


class Narrow(Lengths):
    def forward(self, batch: Sequence[str], *_: Any, **keywords: Any) -> Any:
        if max(map(self.tokens, batch)) * len(batch) > 100:
            raise MemoryError
        return super().forward(batch)


register(app, "lengths", Lengths)
register(app, "narrow", Narrow)


@pytest.fixture(autouse=True)
def _one_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "load_app", lambda _: app)


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text(
        "\n".join([" ".join(["word"] * (1 + n % 40)) for n in range(300)] + ["bad", ""])
    )
    return str(path)


def run(*args: str) -> Any:
    return CliRunner().invoke(tune, [*args, "--device", "cpu", "--seconds", "0.1"])


def test_the_report_is_one_json_object(texts: str) -> None:
    done = run("lengths", "--texts", texts, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["model"], report["device"], report["items"]) == ("lengths", "cpu", 300)
    assert report["fits_tokens"] is None
    assert {row["max_batch_size"] for row in report["rows"]} == {1, 16, 64, 256}
    assert all(row["items_per_s"] > 0 for row in report["rows"])
    assert report["recommended"]["max_batch_size"] in {1, 16, 64, 256}
    assert report["left_out"] >= 0


def test_progress_is_written_to_stderr(texts: str) -> None:
    done = run("lengths", "--texts", texts)
    lines = done.stderr.splitlines()
    assert lines[0] == "loading lengths on cpu"
    assert " s of 0.1: max_batch_size 1, max_batch_tokens -: " in lines[1]
    # One of each pair at most, as it takes less than a second; on a slow machine one a second.
    assert len(lines) <= 1 + 22 + 60


def test_out_of_memory_is_reported_and_no_error(texts: str) -> None:
    done = run("narrow", "--texts", texts, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert any(row["out_of_memory"] for row in report["rows"])
    assert 1 <= report["fits_tokens"] <= 100


def test_output_is_a_table_and_settings_to_copy(texts: str) -> None:
    done = run("narrow", "--texts", texts)
    assert done.exit_code == 0, done.output
    for words in (
        "narrow on cpu: 300 items",
        "out of memory",
        "fit into memory",
        "max_batch_size = ",
        "█",
    ):
        assert words in done.output


def test_unknown_model_is_refused_with_known_names(texts: str) -> None:
    done = run("absent", "--texts", texts)
    assert "'absent': not configured; there are lengths, narrow" in str(done.exception)


def test_texts_of_which_none_is_fit_to_run_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("bad\nbad\n")
    done = run("lengths", "--texts", str(path))
    assert isinstance(done.exception, StartError)
    assert "none of 2 texts is fit to run" in str(done.exception)


def test_texts_in_another_encoding_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("größe\n".encode("latin-1"))
    done = CliRunner().invoke(tune, ["lengths", "--texts", str(path)])
    assert done.exit_code == 2
    assert f"{path}: no text in UTF-8: " in " ".join(done.stderr.split())


def test_the_plot_is_drawn_where_matplotlib_is(texts: str, tmp_path: Path) -> None:
    target = tmp_path / "plot.svg"
    done = run("lengths", "--texts", texts, "--plot", str(target))
    if importlib.util.find_spec("matplotlib") is None:
        assert "--plot needs matplotlib" in str(done.exception)
    else:
        assert target.read_bytes()
