import re

from openai.types import Batch as OpenAIBatch
from openai.types import FileObject as OpenAIFile

from batchery_producer.gateway.batches.files import FILE_ID, FileObject, new_id
from batchery_producer.gateway.batches.store import (
    BATCH_ID,
    BatchError,
    BatchErrors,
    BatchObject,
    BatchUsage,
    RequestCounts,
    Status,
)


def test_ids_sort_by_time_and_have_their_form() -> None:
    times = [new_id("file-").removeprefix("file-")[:14] for _ in range(1000)]
    assert times == sorted(times) != times[::-1]
    assert re.fullmatch(FILE_ID, new_id("file-"))
    assert re.fullmatch(BATCH_ID, new_id("batch_"))


def test_statuses_are_those_of_openai_s_client() -> None:
    known = OpenAIBatch.model_fields["status"].annotation.__args__  # type: ignore[union-attr]
    assert {each.value for each in Status} == set(known)


def test_openai_s_types_read_ours() -> None:
    full = BatchObject(
        id="batch_1",
        endpoint="/v1/embeddings",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=86_401,
        errors=BatchErrors(data=[BatchError(code="a", line=1, message="b", param="c")]),
        usage=BatchUsage(input_tokens=7, total_tokens=7),
        request_counts=RequestCounts(total=3, completed=2, failed=1),
        metadata={"a": "b"},
        model="embed",
    )
    theirs = OpenAIBatch.model_validate_json(full.model_dump_json())
    assert theirs.usage is not None
    assert theirs.usage.total_tokens == 7
    # Nothing of theirs is missing from ours, and we add nothing.
    assert set(OpenAIBatch.model_fields) == set(BatchObject.model_fields)
    file = FileObject(id="file-1", bytes=1, created_at=1, filename="a", purpose="batch")
    assert OpenAIFile.model_validate_json(file.model_dump_json()).filename == "a"
    assert set(FileObject.model_fields) == set(OpenAIFile.model_fields) - {"status_details"}
