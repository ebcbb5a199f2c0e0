"""Places: where the files of a run go, and whether they may go there."""

from pathlib import Path

from batchery.errors import DatasetError
from batchery_producer.dataset import Dataset
from batchery_producer.packing import bare_name
from batchery_producer.source import STANDARD_STREAM

#: What the name of the journal ends with, after the name of the output.
JOURNAL_SUFFIX = ".journal"


def errors_beside(source: Dataset, results: str | Path) -> Path:
    """`out.jsonl.gz` has its failures in `out.errors.jsonl`."""
    if str(results) != STANDARD_STREAM:
        name, folder = Path(results).name, Path(results).parent
    else:
        first = source.sources[0]
        name, folder = "stdin" if first.is_stdin else first.path.name, Path()
    return folder / f"{Path(bare_name(name)).stem}.errors.jsonl"


def journal_beside(results: Path | None) -> Path | None:
    """Where the journal of an output is; None for what is no file on a disk."""
    if results is None or (results.exists() and not results.is_file()):
        return None
    return results.with_name(results.name + JOURNAL_SUFFIX)


def holds_something(path: Path | None) -> bool:
    """Whether there is a file that is not empty."""
    return path is not None and path.is_file() and path.stat().st_size > 0


def check_name(path: Path | None) -> None:
    """Makes sure that one can look whether there is such a file, and a journal beside it.

    Raises:
        DatasetError: The name is too long, or the directory is closed to this user.
    """
    for name in () if path is None else (path, Path(f"{path}{JOURNAL_SUFFIX}")):
        try:
            name.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # Somebody else says so.
        except OSError as error:
            raise DatasetError(f"{path}: cannot be written: {error.strerror}") from None


def check_place(path: Path | None, source: Dataset, *, replace: bool, hint: str) -> None:
    """Makes sure that a file may be written.

    Args:
        path: None is standard output.
        source: Must not be overwritten.
        replace: Whether a file that holds something may be.
        hint: What to do where it may not.

    Raises:
        DatasetError: It may not, or it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise DatasetError(f"{path}: a directory; name a file")
    if not path.parent.is_dir():
        raise DatasetError(f"{path}: there is no directory {path.parent}; create it first")
    if any(is_same(path, each) for each in source.inputs):
        raise DatasetError(f"{path}: this is the input; name another file")
    if not replace and holds_something(path):
        raise DatasetError(f"{path}: already there; {hint}")


def is_same(one: Path | None, other: Path | None) -> bool:
    """Whether two paths are of one file."""
    if one is None or other is None:
        return False
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()
