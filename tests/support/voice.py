"""A voice that says what tests have recognised: eSpeak NG, from the package `espeakng-loader`.

Where that is not installed, tests that need it are skipped.
"""

import ctypes
import io
import wave
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "espeakng_loader"

#: Arguments of the library: samples are given back, and the text is UTF-8.
RETRIEVAL, UTF8 = 1, 1

#: Its parameter for the speed, and words per minute.
SPEED, WORDS_PER_MINUTE = 1, 140


def has_voice() -> bool:
    """Whether the package is installed."""
    return find_spec(PACKAGE) is not None


@cache
def _open() -> tuple[Any, int]:
    """The library, and its samples per second. Both live as long as the process."""
    found = find_spec(PACKAGE)
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent
    library = ctypes.CDLL(str(folder / "libespeak-ng.so"))
    rate = library.espeak_Initialize(RETRIEVAL, 0, str(folder / "espeak-ng-data").encode(), 0)
    library.espeak_SetParameter(SPEED, WORDS_PER_MINUTE, 0)
    return library, rate


def speak(text: str) -> bytes:
    """A recording in which an English text is spoken."""
    library, rate = _open()
    samples = bytearray()

    def take(wave_: int | None, count: int, _: Any) -> int:
        if wave_ and count:
            samples.extend(ctypes.string_at(wave_, 2 * count))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    callback = kind(take)
    library.espeak_SetSynthCallback(callback)
    library.espeak_SetVoiceByName(b"en-us")
    data = text.encode()
    library.espeak_Synth(data, len(data) + 1, 0, 1, 0, UTF8, None, None)
    library.espeak_Synchronize()
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes(bytes(samples))
    return file.getvalue()
