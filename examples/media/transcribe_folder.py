"""Writes down the recordings of a folder: a text and subtitles for each, as soon as it is done.

    python transcribe_folder.py calls

README.md says which model it needs. Recordings that have a text already are left out, so the same
command goes on where an earlier one was stopped.
"""

import os
import sys
from pathlib import Path
from typing import Any

from batchery import Client

REDIS_URL = os.environ.get("BATCHERY_REDIS_URL", "redis://localhost:6379/0")

SUFFIXES = (".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav", ".webm")

#: Recordings that are in Redis at a time.
WINDOW = 16


def transcribe(folder: Path) -> int:
    """Transcribes what has no text yet; returns how many recordings failed."""
    paths = [each for each in sorted(folder.rglob("*")) if each.suffix.lower() in SUFFIXES]
    paths = [each for each in paths if not each.with_suffix(".txt").exists()]
    failures = 0
    with Client(REDIS_URL) as client:
        # Read as the window has space for them.
        recordings = (path.read_bytes() for path in paths)
        for outcome in client.task("hear").as_completed(recordings, window=WINDOW):
            path = paths[outcome.index]
            if outcome.error is not None:
                failures += 1
                print(f"{path}: {outcome.error}", file=sys.stderr)
                continue
            path.with_suffix(".srt").write_text(write_subtitles(outcome.value["segments"]))
            # Last, as it says that this recording is done.
            path.with_suffix(".txt").write_text(outcome.value["text"].strip() + "\n")
            print(path)
    return failures


def write_subtitles(segments: list[dict[str, Any]]) -> str:
    """Segments as players of videos take them: numbered, each with its times and its text."""
    blocks = [
        f"{number}\n{clock(each['start_s'])} --> {clock(each['end_s'])}\n{each['text'].strip()}\n"
        for number, each in enumerate(segments, 1)
    ]
    return "\n".join(blocks)


def clock(seconds: float) -> str:
    """A time as `01:02:03,456`."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    rest = f"{milliseconds // 1000:02},{milliseconds % 1000:03}"
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest}"


if __name__ == "__main__":
    sys.exit(1 if transcribe(Path(sys.argv[1])) else 0)
