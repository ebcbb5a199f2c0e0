"""Any container and codec becomes samples; what is no sound, or too much of it, is refused."""

import io
import socket
import threading
from pathlib import Path

import av
import numpy as np
import pytest

from batchery import InvalidItem
from batchery_worker.models.audio.decoding import decode_audio
from support.sounds import RATE, make_recording, make_tones, write_header, write_sound

TONES = make_tones(2)
PCM = (TONES * 32_767).astype("<i2").tobytes()


def refusal(data: bytes, max_audio_s: float = 60) -> str:
    with pytest.raises(InvalidItem) as caught:
        decode_audio(data, RATE, max_audio_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def make_film() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10, options={})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(picture))
        container.mux(stream.encode(None))
    return file.getvalue()


@pytest.mark.parametrize(
    ("codec", "container"),
    [("pcm_s16le", "wav"), ("flac", "flac"), ("libmp3lame", "mp3"), ("aac", "mp4")],
)
def test_containers_and_codecs_become_the_same_samples(codec: str, container: str) -> None:
    found = decode_audio(write_sound(TONES, codec, container), RATE, 60)
    assert found.dtype == np.float32
    assert len(found) == pytest.approx(len(TONES), rel=0.1)
    if container in ("wav", "flac"):
        np.testing.assert_allclose(found, TONES, atol=1e-4)


def test_samples_come_at_the_rate_of_the_model() -> None:
    data = make_recording(2)
    assert len(decode_audio(data, 48_000, 60)) == pytest.approx(96_000, rel=0.01)
    assert len(decode_audio(data, 8_000, 60)) == pytest.approx(16_000, rel=0.01)


@pytest.mark.parametrize("layout", ["stereo", "5.1", "7.1"])
def test_channels_are_mixed_into_one(layout: str) -> None:
    found = decode_audio(write_sound(TONES, layout=layout), RATE, 60)
    assert found.shape == TONES.shape
    assert np.corrcoef(found, TONES)[0, 1] > 0.999


def test_damaged_parts_are_left_out() -> None:
    whole = write_sound(TONES, "libmp3lame", "mp3")
    damaged = whole[:2000] + bytes(500) + whole[2500:]
    assert len(decode_audio(damaged, RATE, 60)) > RATE
    assert len(decode_audio(whole[: len(whole) // 2], RATE, 60)) > RATE / 2


def test_header_that_lies_about_the_length_is_no_reason() -> None:
    assert len(decode_audio(write_header(PCM), RATE, 60)) == 2 * RATE


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "audio: cannot be decoded"),
        (b"hello, world", "audio: cannot be decoded"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "audio: has no audio stream"),
        (make_film(), "audio: has no audio stream; there is video"),
        (write_header(PCM, codec=0x5555), "audio: its codec is not known to FFmpeg"),
        (write_header(b""), "audio: has no samples"),
        (write_header(bytes(32_000)), "audio: is silent; all samples are 0"),
        (write_header(PCM, channels=200), "audio: cannot be decoded"),
        (write_header(PCM, rate=1), "audio: has 1 samples per second"),
        (write_header(PCM, rate=2**31 - 1), "audio: has 2147483647 samples per second"),
    ],
)
def test_what_is_no_sound_is_refused_in_one_line(data: bytes, problem: str) -> None:
    assert refusal(data).startswith(problem)


def test_decoding_ends_at_the_maximum_length() -> None:
    short = write_sound(np.zeros(600 * RATE), "flac", "flac")
    assert len(short) < 1_000_000
    assert refusal(short, 10) == "audio: is longer than media.max_audio_s = 10 seconds; cut it"
    assert refusal(write_header(PCM, rate=1000), 10).startswith("audio: is longer than")


@pytest.mark.parametrize(
    "text",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{path}'\n",
        "ffconcat version 1.0\nfile '{url}'\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 5004 RTP/AVP 0\n",
    ],
)
def test_file_that_names_another_one_opens_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(make_recording(1))
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            try:
                server.accept()[0].close()
                asked.set()
            except OSError:
                pass

        threading.Thread(target=listen, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a.wav"
        data = text.format(url=url, path=tmp_path / "secret.wav").encode()
        assert refusal(data).startswith("audio: cannot be decoded")
        assert not asked.is_set()
