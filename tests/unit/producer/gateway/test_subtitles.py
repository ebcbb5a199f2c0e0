"""Subtitles as players take them."""

from batchery_producer.gateway.routes.audio import write_subtitles

SEGMENTS = [
    {"start_s": 0.0, "end_s": 1.5, "text": " Hello --> there.\n\nGo on."},
    {"start_s": 3599.9996, "end_s": 36_000.25, "text": " End."},
]


def test_subrip_has_numbers_and_commas() -> None:
    assert write_subtitles(SEGMENTS, is_vtt=False) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello -> there. Go on.\n\n"
        "2\n01:00:00,000 --> 10:00:00,250\nEnd.\n"
    )
    assert write_subtitles([], is_vtt=False) == ""


def test_webvtt_begins_with_its_name() -> None:
    assert write_subtitles(SEGMENTS[:1], is_vtt=True) == (
        "WEBVTT\n\n1\n00:00:00.000 --> 00:00:01.500\nHello -> there. Go on.\n"
    )
    assert write_subtitles([], is_vtt=True) == "WEBVTT\n"
