"""What the processes of a run have computed, in a file of each: a kill -9 cannot take that back."""

import json
import os
from pathlib import Path
from typing import NamedTuple


class Counts(NamedTuple):
    """Of all processes of a run, in tokens."""

    #: That were given out, and those of texts that a process began with what another had made.
    generated: int
    fed_again: int
    #: How often that was.
    resumes: int


class Ledger:
    """The file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")

    def write(self, **tokens: int) -> None:
        """Writes `generated` or `fed_again` down, for the kernel, which outlives the process."""
        self._file.write(json.dumps(tokens) + "\n")
        self._file.flush()


def read_counts(folder: Path) -> Counts:
    """Sums up the ledgers of a run; a line that a kill has cut counts for nothing."""
    generated = fed_again = resumes = 0
    for book in folder.glob("*.jsonl"):
        for text in book.read_text(encoding="utf-8").splitlines():
            if text.endswith("}"):
                line = json.loads(text)
                generated += line.get("generated", 0)
                fed_again += line.get("fed_again", 0)
                resumes += "fed_again" in line
    return Counts(generated, fed_again, resumes)
