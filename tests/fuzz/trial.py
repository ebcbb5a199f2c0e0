"""One input for one decoder, within bounds."""

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fuzz.decoders import Decoder

#: How much time of a processor one input may take, in seconds; the largest takes milliseconds.
MAX_S = 10.0

#: Memory that one input may take: so much, and so many times its own size, in bytes.
MAX_BYTES, MAX_TIMES = 64 << 20, 64


@contextmanager
def watched_memory(decoder: Decoder) -> Iterator[None]:
    """Has Python count what the inputs within take.

    Once for many of them: each new start costs a process 1 to 2 KiB that it never gets back.
    """
    # It would end the process where threads of pyarrow free memory while it stops.
    if not decoder.is_bounded:
        yield
        return
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


def try_input(decoder: Decoder, data: bytes) -> None:
    """Gives a decoder an input, within `watched_memory`.

    Raises:
        AssertionError: It took too long, or too much memory.
        Exception: What it must not raise.
    """
    start_s = time.thread_time()
    tracemalloc.reset_peak()
    before_bytes, _ = tracemalloc.get_traced_memory()
    with suppress(*decoder.errors):
        decoder.run(data)
    taken_s = time.thread_time() - start_s
    taken_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
    assert taken_s < MAX_S, f"{taken_s:.1f} s for {len(data):,} bytes"
    assert taken_bytes < MAX_BYTES + MAX_TIMES * len(data), f"{taken_bytes:,} bytes"
