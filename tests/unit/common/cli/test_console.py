"""What commands have in common."""

import signal

import pytest
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from rich.table import Table

from batchery import RedisUnavailable
from batchery.cli.console import Interrupt, broker_errors, render


def test_broker_that_is_away_is_named_with_what_to_look_at() -> None:
    told = r"^the broker does not answer: refused; is it up\?$"
    with pytest.raises(RedisUnavailable, match=told), broker_errors():
        raise NoConnection("refused")


@pytest.mark.parametrize("error", [OutOfMemoryError("OOM maxmemory"), ReadOnlyError("a replica")])
def test_broker_that_refuses_a_command_is_not_called_away(error: Exception) -> None:
    told = f"^the broker answers, and refuses a command: {error}$"
    with pytest.raises(RedisUnavailable, match=told), broker_errors():
        raise error


def test_first_signal_is_noted_and_the_second_one_raises() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interrupt() as interrupt:
        assert not interrupt()
        signal.raise_signal(signal.SIGTERM)
        assert interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_names_of_others_are_no_markup_and_lines_have_no_spaces_at_their_end() -> None:
    table = Table("name")
    table.add_row("[bold]x[/nothing]")
    text = render(table, 100)
    assert "[bold]x[/nothing]" in text
    assert text.splitlines() == [line.rstrip() for line in text.strip("\n").splitlines()]
