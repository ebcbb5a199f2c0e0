"""`batchery stats` ends at Ctrl-C."""

import signal
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner

from batchery.cli import stats
from batchery.cli.survey import Survey


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_look_takes_a_time_that_has_an_end(seconds: str) -> None:
    result = CliRunner().invoke(stats.stats, ["--once", "--timeout", seconds])
    assert (result.exit_code, "Invalid value for '--timeout'" in result.output) == (2, True)


class Interrupting:
    """Dies while Ctrl-C comes."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_inside_a_destructor_still_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    looks: list[Any] = []

    def survey(*_: Any) -> Survey:
        looks.append(Interrupting())
        looks.clear()
        return Survey({}, {})

    monkeypatch.setattr(stats, "survey", survey)
    monkeypatch.setattr(stats, "check_broker", lambda _: None)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        stats.watch(Celery(set_as_current=False), once=False, as_json=as_json)
    assert signal.getsignal(signal.SIGINT) is before
