"""What commands have in common: signals, a broker that is away, tables and figures as text."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from kombu.exceptions import OperationalError
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from batchery.errors import RedisUnavailable

if TYPE_CHECKING:
    from rich.console import RenderableType

#: What a broker that is away raises.
AWAY = (OperationalError, RedisError, OSError)

#: What asks a command to end.
SIGNALS = (signal.SIGINT, signal.SIGTERM)

#: How a figure ends -> by what it is multiplied, and the unit behind it.
UNITS = {
    "_ms": (1, " ms"),
    "_us": (1, " µs"),
    "_s": (1, " s"),
    "_kib": (2**-10, " MiB"),
    "_bytes": (2**-20, " MiB"),
    **dict.fromkeys(("padding", "padding_waste", "hit_rate", "error"), (100, " %")),
}

#: Texts that need no name in front of them.
NAMELESS = ("state", "error", "why")


@contextmanager
def broker_errors(server: str = "the broker") -> Iterator[None]:
    """Raises errors of a server that is away, full or a replica, or refuses its user.

    Raises:
        RedisUnavailable: In their place.
    """
    try:
        yield
    except NoPermissionError as error:
        raise RedisUnavailable(
            f"{server} refuses its user: {error}; `batchery acl` prints what each role may do"
        ) from error
    except ResponseError as error:
        raise RedisUnavailable(f"{server} answers, and refuses a command: {error}") from error
    except AWAY as error:
        raise RedisUnavailable(f"{server} does not answer: {error}; is it up?") from error


class Interrupt:
    """Notes SIGINT and SIGTERM while entered; a call returns whether one came. Main thread only.

    The handler of the first one only sets a flag, as it may interrupt any code, even while that
    holds a lock. The second one raises `KeyboardInterrupt`.
    """

    def __init__(self) -> None:
        """Handles nothing yet."""
        self._came = False
        self._before: Mapping[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether a signal came."""
        return self._came

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _note(self, *_: object) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True


def printable(text: str) -> str:
    """Escapes a stranger's text, so that it cannot move a terminal's cursor."""
    return "".join(
        char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text
    )


def render(drawing: "RenderableType", least_width: int = 0) -> str:
    """Makes text of a table or the like.

    Args:
        drawing: Names of others in it are taken literally.
        least_width: Its width without a terminal, in characters.
    """
    # Clients survey queues without a console, so they do not wait for this import.
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, least_width)
    with console.capture() as capture:
        console.print(drawing)
    # Tables are padded with spaces, which are a nuisance in a file or a mail.
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n")


def describe(thing: Any, names: Sequence[str], nothing: str = "") -> str:
    """Some figures of a thing, each with its name and unit; without those that are 0 or unknown."""
    values = {name: read(thing, name) for name in names}
    return ", ".join(_spell(*each) for each in values.items() if each[1]) or nothing


def read(thing: Any, path: str) -> Any:
    """An attribute, or an entry, by its path; None where there is none."""
    for name in path.split("."):
        thing = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
    return thing


def _spell(path: str, value: Any) -> str:
    name = path.rpartition(".")[2].removeprefix("mean_")
    if isinstance(value, str) or name == "pid":
        return str(value) if name in NAMELESS else f"{name.replace('_', ' ')} {value}"
    unit = next((each for each in UNITS if name.endswith(each)), "")
    scale, shown = UNITS.get(unit, (1, ""))
    number = f"{value:,}" if isinstance(value, int) and scale == 1 else f"{value * scale:,.1f}"
    label = name.removesuffix(unit) if unit.startswith("_") else name
    return f"{label.replace('_', ' ')} {number}{shown}"
