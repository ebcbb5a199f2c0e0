"""What transformers says, and how much of it is passed on."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

#: Longest reason that a one-line error quotes from transformers, in characters; what is left out is
#: its middle, as what happened comes first and what to do last.
MAX_REASON_CHARS = 400


def reason(error: Exception) -> str:
    """The text of an error, which transformers spreads over many lines, on one."""
    text = " ".join(str(error).split()) or type(error).__name__
    half = MAX_REASON_CHARS // 2
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:half]} ... {text[-half:]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps progress bars and advice out of the worker's log; errors say what matters."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
