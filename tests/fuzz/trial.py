"""One input for one decoder, within bounds."""

import time
import tracemalloc

from fuzz.decoders import Decoder

#: How long one input may take, in seconds; the largest of them takes some milliseconds.
MAX_S = 10.0

#: Memory that one input may take: so much, and so many times its own size, in bytes.
MAX_BYTES, MAX_TIMES = 64 << 20, 64


def try_input(decoder: Decoder, data: bytes) -> None:
    """Gives a decoder an input.

    Raises:
        AssertionError: It took too long, or too much memory.
        Exception: What it must not raise.
    """
    start_s = time.monotonic()
    # It would end the process where threads of pyarrow free memory while it stops.
    if decoder.is_bounded:
        tracemalloc.start()
    try:
        decoder.run(data)
    except decoder.errors:
        pass
    finally:
        taken_s, peak_bytes = time.monotonic() - start_s, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert taken_s < MAX_S, f"{taken_s:.1f} s for {len(data):,} bytes"
    assert peak_bytes < MAX_BYTES + MAX_TIMES * len(data), f"{peak_bytes:,} bytes"
