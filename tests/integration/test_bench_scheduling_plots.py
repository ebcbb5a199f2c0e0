"""The pictures of docs/scheduling.md are drawn, and are those of the scheduler that is here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from benchmarks.scheduling.plots.__main__ import PLOTS, main
from benchmarks.scheduling.plots.canvas import said_by

DOCS = Path(__file__).resolve().parents[2] / "docs" / "scheduling"

#: Simulates for ten seconds: more than a test should.
SLOW = {"deadlines"}

#: Machines differ in the last digits of logarithms, and so in a job now and then.
RELATIVE, ABSOLUTE = 0.05, 0.5


def numbers(figures: Any) -> Iterator[float]:
    if isinstance(figures, dict):
        figures = list(figures.values())
    if isinstance(figures, list):
        for each in figures:
            yield from numbers(each)
    elif figures is not None:
        yield figures


@pytest.mark.parametrize("name", [each for each in PLOTS if each not in SLOW])
def test_committed_picture_is_that_of_the_scheduler(name: str) -> None:
    said = list(numbers(said_by(DOCS / f"{name}.svg")))
    now = list(numbers(PLOTS[name].measured(1.0)))
    wanted = pytest.approx(said, rel=RELATIVE, abs=ABSOLUTE)
    assert now == wanted, "run python -m benchmarks.scheduling.plots"


def drawn(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A picture of a tenth of the jobs."""
    command = ["plots", name, "--scale", "0.1", "--target", str(folder)]
    monkeypatch.setattr("sys.argv", command)
    main()
    return (folder / f"{name}.svg").read_bytes()


@pytest.mark.parametrize("name", PLOTS)
def test_picture_is_drawn_with_text_as_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert b"<text" in drawn(name, tmp_path, monkeypatch)


def test_picture_is_the_same_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = drawn("small_calls", tmp_path / "one", monkeypatch)
    assert one == drawn("small_calls", tmp_path / "two", monkeypatch)


def test_unknown_picture_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["plots", "sharing"])
    with pytest.raises(SystemExit):
        main()
    assert "no picture 'sharing'; there are shares, " in capsys.readouterr().err
