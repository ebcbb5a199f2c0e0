import re
import time

import pytest
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject as OpenAIFile

from batchery_producer.gateway.batches.files import FILE_ID, FileObject, new_id
from batchery_producer.gateway.batches.store import (
    BATCH_ID,
    NEXT,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchUsage,
    RequestCounts,
    Status,
)


def batch(status: Status = Status.VALIDATING) -> BatchObject:
    return BatchObject(
        id="batch_1",
        endpoint="/v1/embeddings",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=86_401,
        status=status,
    )


def test_ids_sort_by_time_and_have_their_form() -> None:
    first = new_id("file-")
    time.sleep(0.001)
    second = new_id("file-")
    assert first < second
    assert re.fullmatch(FILE_ID, first)
    assert re.fullmatch(BATCH_ID, new_id("batch_"))
    assert first[-32:] != second[-32:]


@pytest.mark.parametrize(
    "way",
    [
        [Status.IN_PROGRESS, Status.FINALIZING, Status.COMPLETED],
        [Status.IN_PROGRESS, Status.FINALIZING, Status.EXPIRED],
        [Status.IN_PROGRESS, Status.CANCELLING, Status.CANCELLED],
        [Status.CANCELLING, Status.CANCELLED],
        [Status.FAILED],
    ],
)
def test_batch_goes_its_way_and_each_status_has_its_time(way: list[Status]) -> None:
    found = batch()
    for at_s, status in enumerate(way, 10):
        assert not found.is_over
        found = found.moved(status, at_s + 0.9)
        assert (found.status, getattr(found, f"{status}_at")) == (status, at_s)
    assert found.is_over


def test_statuses_are_those_of_openai_s_client() -> None:
    known = OpenAIBatch.model_fields["status"].annotation.__args__  # type: ignore[union-attr]
    assert {each.value for each in Status} == set(known) == set(NEXT)


@pytest.mark.parametrize("status", [each for each in Status if not NEXT[each]])
def test_batch_that_is_over_stays_so(status: Status) -> None:
    for after in Status:
        with pytest.raises(ValueError, match=f"is {status} cannot become {after}"):
            batch(status).moved(after, 1)
    assert not batch(status).can_be_cancelled


def test_batch_can_be_cancelled_until_its_files_are_made() -> None:
    can = {each for each in Status if batch(each).can_be_cancelled}
    assert can == {Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING}


def test_openai_s_types_read_ours() -> None:
    full = batch().model_copy(
        update={
            "errors": BatchErrors(data=[BatchError(code="a", line=1, message="b", param="c")]),
            "usage": BatchUsage(input_tokens=7, total_tokens=7),
            "request_counts": RequestCounts(total=3, completed=2, failed=1),
            "metadata": {"a": "b"},
            "model": "embed",
        }
    )
    theirs = OpenAIBatch.model_validate_json(full.model_dump_json())
    assert theirs.usage is not None
    assert theirs.usage.total_tokens == 7
    # Nothing of theirs is missing from ours, and we add nothing.
    assert set(OpenAIBatch.model_fields) == set(BatchObject.model_fields)
    file = FileObject(id="file-1", bytes=1, created_at=1, filename="a", purpose="batch")
    assert OpenAIFile.model_validate_json(file.model_dump_json()).filename == "a"
    assert set(FileObject.model_fields) == set(OpenAIFile.model_fields) - {"status_details"}
