"""What travels of a traceback, and what is made of it at the other end."""

import sys
import traceback

from batchery.execution.bisect_failures import isolate
from batchery.tracebacks import MAX_FRAMES, collect_frames, with_frames


def raised(depth: int = 0) -> LookupError:
    try:
        fail(depth)
    except LookupError as error:
        return error
    raise AssertionError


def fail(depth: int) -> None:
    if depth:
        fail(depth - 1)
    else:
        raise LookupError("here")


def test_traceback_made_of_frames_prints_as_the_one_that_they_come_from() -> None:
    error = raised()
    twin = with_frames(LookupError("here"), collect_frames(error))
    plain = [line for line in traceback.format_exception(error) if set(line.strip()) - set("^~ \n")]
    assert traceback.format_exception(twin) == plain


def test_frames_have_the_names_of_modules_and_no_variables() -> None:
    made = with_frames(LookupError("here"), collect_frames(raised())).__traceback__
    assert made is not None
    assert made.tb_frame.f_globals["__name__"] == __name__
    assert made.tb_frame.f_locals == {}
    assert made.tb_frame.f_code.co_name == "raised"
    # Celery clears the frames of a failed job.
    made.tb_frame.clear()


def test_frames_begin_where_our_own_code_ends() -> None:
    def broken(items: object) -> object:
        raise LookupError(items)

    (outcome,) = isolate(broken, ["x"], name="broken")
    assert [(function, module) for _, function, _, module in outcome.frames] == [
        ("broken", __name__)
    ]


def test_innermost_frames_of_a_deep_recursion_travel() -> None:
    frames = collect_frames(raised(depth=200))
    assert len(frames) == MAX_FRAMES
    assert {function for _, function, _, _ in frames} == {"fail"}


def test_exception_that_was_not_raised_has_no_frames() -> None:
    assert collect_frames(LookupError()) == ()
    assert with_frames(LookupError(), ()).__traceback__ is None
    assert sys.exc_info() == (None, None, None)
