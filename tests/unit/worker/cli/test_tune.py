"""`batchery tune`, with models that need no torch, on a clock of their own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from batchery import Failed, InvalidItem, Model, StartError, install, register
from batchery_worker.cli import tune as command
from batchery_worker.cli.tune import ROUNDS, SIZES, recommend, tune
from batchery_worker.memory import Memory
from batchery_worker.serving.served_model import LoadedModel

app = install(Celery("tuned", broker="memory://", set_as_current=False))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Priced(Model):
    """Items are their own lengths; a pass takes 10 µs per token, padding counted, and 1 ms."""

    def __init__(self, clock: Clock, fits: int = 10**9, slowness: float = 1.0) -> None:
        self.clock = clock
        self.fits = fits
        self.slowness = slowness

    def tokens(self, prepared: int) -> int:
        return prepared

    def forward(self, batch: Sequence[int], *_: Any, **keywords: Any) -> Any:
        tokens = max(batch) * len(batch)
        if tokens > self.fits:
            raise MemoryError
        self.clock.now_s += self.slowness * (1e-5 * tokens + 1e-3)
        return list(batch)


ITEMS = [10 + (number * 37) % 90 for number in range(512)]


def measure(
    limit_s: float = 600.0, items: Sequence[int] = ITEMS, **price: Any
) -> tuple[list[dict[str, Any]], int, float]:
    """The rows, the token budget as it was learned, and how long it took."""
    clock = Clock()
    served = LoadedModel("priced", Priced(clock, **price), "cpu", Memory(), clock=clock)
    rows = command.measure(served, items, limit_s, 8192, clock)
    return rows, served.figures()["max_batch_tokens"], clock.now_s


def test_rates_follow_the_clock_and_batches_beat_single_items() -> None:
    rows, budget, _ = measure()
    assert [row["max_batch_size"] for row in rows] == list(SIZES)
    single = rows[0]
    assert single["padding_waste"] == 0
    assert single["items_per_s"] == pytest.approx(1 / (1e-3 + 1e-5 * 54), rel=0.1)
    assert rows[-1]["items_per_s"] > 1.5 * single["items_per_s"]
    assert budget == 8192


@pytest.mark.parametrize("slowness", [1, 100, 10_000])
def test_slow_machine_ends_in_time_and_measures_each_size(slowness: int) -> None:
    rows, _, took_s = measure(30.0, slowness=slowness)
    assert len(rows) == len(SIZES)
    # One batch of each size in each round is the least, and the last one may have just begun.
    assert took_s <= 30 + ROUNDS * len(SIZES) * slowness * (1e-5 * sum(ITEMS) + 2e-3)


def test_trials_over_some_of_the_items_are_compared_by_tokens() -> None:
    items = [10] * 256 + [90] * 256
    rows, _, _ = measure(0.5, items)
    assert rows[0]["items_per_s"] == pytest.approx(1 / (1e-3 + 1e-5 * 50), rel=0.4)


def test_memory_that_runs_out_teaches_the_budget() -> None:
    rows, budget, _ = measure(items=[50] * 512, fits=2000)
    assert 1000 <= budget <= 2000
    assert all(row["items_per_s"] > 0 for row in rows)


def test_smallest_size_within_5_percent_of_the_best_is_recommended() -> None:
    rates = {128: 99.0, 16: 95.1, 64: 100.0}
    rows = [{"max_batch_size": size, "items_per_s": rate} for size, rate in rates.items()]
    assert recommend(rows) == 16
    assert recommend([*rows, {"max_batch_size": 32, "items_per_s": 102.0}]) == 32


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


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(command, "load_app", lambda _: app)
    path = tmp_path / "texts.txt"
    lines = [" ".join(["word"] * (1 + n % 40)) for n in range(300)]
    path.write_text("\n".join([*lines, "bad", ""]))
    return str(path)


def run(*args: str) -> Any:
    return CliRunner().invoke(tune, [*args, "--device", "cpu", "--seconds", "0.1"])


@pytest.mark.parametrize("name", ["lengths", "narrow"])
def test_output_is_a_table_and_settings_to_copy(texts: str, name: str) -> None:
    done = run(name, "--texts", texts)
    assert done.exit_code == 0, done.output
    first, *rows, last = done.stdout.strip().splitlines()
    assert first.startswith(f"{name} on cpu: 300 items, ")
    assert [int(row.split()[2]) for row in rows if "items/s" in row] == list(SIZES)
    settings = dict(line.split(" = ") for line in (*rows, last) if " = " in line)
    assert int(settings.pop("max_batch_size")) in SIZES
    # Less than the 1,024 of a CPU, however few trials there was time for.
    learned = settings.pop("max_batch_tokens", None)
    assert (learned is None) if name == "lengths" else (1 <= int(learned or 0) < 1024)
    lines = done.stderr.splitlines()
    assert lines[0] == f"loading {name} on cpu"
    assert len(lines) == 1 + ROUNDS * len(SIZES)


def test_unknown_model_is_refused_with_known_names(texts: str) -> None:
    done = run("absent", "--texts", texts)
    assert "'absent': not configured; there are lengths, narrow" in str(done.exception)


def test_texts_of_which_none_is_fit_to_run_are_refused(texts: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_text("bad\nbad\n")
    done = run("lengths", "--texts", str(path))
    assert isinstance(done.exception, StartError)
    assert "none of 2 texts is fit to run" in str(done.exception)


def test_texts_in_another_encoding_are_refused(texts: str, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("größe\n".encode("latin-1"))
    done = run("lengths", "--texts", str(path))
    assert done.exit_code == 2
    assert f"{path}: no text in UTF-8: " in " ".join(done.stderr.split())
