"""From the bytes of a recording to its samples: any container and codec that FFmpeg knows."""

import io
from collections.abc import Iterator
from contextlib import suppress

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler
from numpy.typing import NDArray

from batchery.errors import InvalidItem

#: Samples of a recording: mono, float32, of shape (N,).
Samples = NDArray[np.float32]

#: Rates that recordings have, in samples per second. A header may say any, and the filter that
#: makes another one of it would take as much memory.
RATES = range(1_000, 768_001)

#: Some formats name other files, or addresses. FFmpeg gets an open file, and may open none itself.
NO_FILES = {"protocol_whitelist": ""}


def decode_audio(data: bytes, rate: int, max_audio_s: float) -> Samples:
    """Decodes the first audio stream of a recording, or of a film.

    Channels are mixed into one, and samples are converted, as the command `ffmpeg -ac 1 -ar RATE`
    does. A damaged packet is left out.

    Args:
        data: The file.
        rate: Samples per second that are wanted.
        max_audio_s: Maximum length of the recording, in seconds. Decoding ends there, whatever
            length the file says.

    Returns:
        Samples, mostly from -1 to 1; at least one of them is not 0.

    Raises:
        InvalidItem: The file has no sound, or too much of it, is silent, or needs a decoder that is
            not there.
    """
    samples, file = bytearray(), io.BytesIO(data)
    max_bytes = max_audio_s * rate * np.float32().nbytes
    try:
        with av.open(file, "r", metadata_errors="ignore", options=NO_FILES) as container:
            for frame in _resampled(_frames(container), rate):
                samples += frame.to_ndarray().tobytes()
                if len(samples) > max_bytes:
                    limit = f"media.max_audio_s = {max_audio_s:g} seconds"
                    raise InvalidItem(f"audio: is longer than {limit}; cut it")
    except av.FFmpegError as error:
        raise InvalidItem(f"audio: cannot be decoded: {error.strerror}") from None
    found = np.frombuffer(samples, np.float32)
    if not found.size:
        raise InvalidItem("audio: has no samples")
    if not found.any():
        raise InvalidItem("audio: is silent; all samples are 0")
    if not np.isfinite(found).all():
        raise InvalidItem("audio: has samples that are not finite numbers")
    return found


def _frames(container: av.container.InputContainer) -> Iterator[AudioFrame]:
    """The frames of the first audio stream."""
    if not container.streams.audio:
        there = ", ".join(sorted({each.type for each in container.streams})) or "nothing"
        raise InvalidItem(f"audio: has no audio stream; there is {there}")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise InvalidItem("audio: its codec is not known to FFmpeg, or not in this build of it")
    for packet in container.demux(stream):
        with suppress(av.InvalidDataError):
            yield from packet.decode()


def _resampled(frames: Iterator[AudioFrame], rate: int) -> Iterator[AudioFrame]:
    """The same as mono float32 of a rate; the format of the frames may change between two."""
    resampler, known = None, None
    for frame in frames:
        if frame.sample_rate not in RATES:
            raise InvalidItem(f"audio: has {frame.sample_rate} samples per second; resample it")
        shape = (frame.sample_rate, frame.format.name, frame.layout.name)
        if resampler is None or shape != known:
            if resampler is not None:
                yield from resampler.resample(None)
            resampler, known = AudioResampler("flt", "mono", rate), shape
        yield from resampler.resample(frame)
    if resampler is not None:
        yield from resampler.resample(None)
