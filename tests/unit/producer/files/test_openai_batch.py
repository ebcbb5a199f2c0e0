import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from batchery import DatasetError
from batchery_producer.answers import Answer
from batchery_producer.files.dataset import Dataset
from batchery_producer.files.journal import Journal
from batchery_producer.files.openai_batch import UNSERVED, in_form, shortened
from batchery_producer.files.records import Broken, Record
from batchery_producer.gateway.routes.openai import EmbeddingsRequest
from batchery_producer.run.file_run import choose_task
from batchery_producer.run.output import Output


def request(number: int, given: Any = "some text", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "embed", "input": given, **body},
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_requests_of_openai_are_recognised(tmp_path: Path) -> None:
    rows = [request(1, "one"), request(2, ["two"]), request(3, ["a", "b"], user="somebody")]
    rows += [request(4, [7, 8]), request(5, [[7], [8, 9]])]
    dataset = Dataset(write(tmp_path / "in.jsonl", rows))
    assert (dataset.is_openai, dataset.model) == (True, "embed")
    assert choose_task(dataset, None) == "embed"
    assert list(dataset) == [
        Record(1, "request-1", "one"),
        Record(2, "request-2", "two"),
        Record(3, "request-3", ["a", "b"], 0, 2),
        Record(4, "request-4", [7, 8]),
        Record(5, "request-5", [[7], [8, 9]], 0, 2),
    ]


def test_token_ids_under_another_name_than_the_task_s_are_refused(tmp_path: Path) -> None:
    rows = [request(1, [7, 8]), request(2, "a text"), request(3, [[7]])]
    dataset = Dataset(write(tmp_path / "in.jsonl", rows))
    dataset.is_own_name = "model".__eq__
    first, second, third = dataset
    assert isinstance(first, Broken)
    assert isinstance(third, Broken)
    assert first.reason == third.reason
    assert "'embed' is an alias" in first.reason
    assert isinstance(second, Record)


def test_fields_of_other_vendors_are_refused_by_name(tmp_path: Path) -> None:
    assert set(UNSERVED) == EmbeddingsRequest.model_fields.keys() - {
        *("input", "model", "user", "encoding_format", "dimensions")
    }
    rows = [request(number, **{name: 8}) for number, name in enumerate(UNSERVED)]
    for row, name in zip(Dataset(write(tmp_path / "in.jsonl", rows)), UNSERVED, strict=True):
        assert isinstance(row, Broken)
        assert row.reason.startswith(f"{name}: not served in batch files")


def test_rows_in_another_form_or_with_a_named_field_are_no_requests(tmp_path: Path) -> None:
    rows = write(tmp_path / "a.jsonl", [{"custom_id": "a", "text": "b"}])
    assert not Dataset(rows).is_openai
    requests = write(tmp_path / "b.jsonl", [request(1)])
    dataset = Dataset(requests, field="body")
    assert not dataset.is_openai
    with pytest.raises(DatasetError, match=r"no task; name one with --task.* --format openai"):
        choose_task(dataset, None)
    with pytest.raises(DatasetError, match="--format openai reads OpenAI's requests"):
        list(Dataset(requests, id_field="custom_id"))


@pytest.mark.parametrize("format_", [None, "openai"])
def test_requests_whose_first_lines_are_broken_are_recognised(
    tmp_path: Path, format_: str | None
) -> None:
    path = write(tmp_path / "in.jsonl", [request(1), request(2)])
    path.write_text("{broken\n[]\n" + path.read_text())
    dataset = Dataset(path, format=format_)
    assert (dataset.is_openai, dataset.model) == (True, "embed")
    assert [type(row) for row in dataset] == [Broken, Broken, Record, Record]


def test_each_line_is_a_request_if_the_format_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [{"text": "one"}, request(1), request(2)])
    assert not Dataset(path).is_openai
    dataset = Dataset(path, format="openai")
    assert choose_task(dataset, None) == "embed"
    assert [type(row) for row in dataset] == [Broken, Record, Record]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            request(2, url="x") | {"url": "/v1/chat/completions"},
            "must be /v1/embeddings, the endpoint of the batch",
        ),
        (request(2) | {"method": "GET"}, "method 'GET': must be POST"),
        (request(2) | {"custom_id": "\ud800"}, "custom_id has half a character"),
        (request(2, model=""), "no model, or it is no text"),
        (request(2, model="other"), "model 'other', but the first request has model 'embed'"),
        (request(2, encoding_format="hex"), "encoding_format: float or base64"),
        (request(2, []), "input must be a text or token ids, or a list of 1 to 10,000 of them"),
        (request(2, [1, "a"]), "input must be a text or token ids"),
        (request(2, [1, -2]), "input must be a text or token ids"),
        (request(2, [[1], []]), "input must be a text or token ids"),
        (request(2, ["a"] * 10_001), "input must be a text or token ids"),
        (request(2, dimensions=0), "dimensions: a whole number from 1 on"),
        (request(2, dimensions="8"), "dimensions: a whole number from 1 on"),
        (request(1), "the id 'request-1' is already used in line 1"),
        ({"custom_id": "x"}, "no body, .* a request has custom_id, method, url and body"),
        ({"custom_id": 5}, "no custom_id, or it is no text"),
        ("bare", "a bare string; expected a request"),
    ],
)
def test_request_that_cannot_be_served_fails_alone(tmp_path: Path, row: Any, why: str) -> None:
    good, bad, last = Dataset(write(tmp_path / "in.jsonl", [request(1), row, request(3)]))
    assert isinstance(good, Record)
    assert isinstance(last, Record)
    assert isinstance(bad, Broken)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(bad.reason)


def run(tmp_path: Path, **body: Any) -> tuple[list[Any], list[Any], Journal]:
    rows = [request(1, **body), request(2, **body), request(3, **body), {"no": "request"}]
    dataset = Dataset(write(tmp_path / "in.jsonl", rows))
    with Output(dataset, tmp_path / "out.jsonl") as output:
        journal = output.open(Journal.of(dataset.sources, "embed", {}, 4))
        first = next(iter(dataset))
        assert isinstance(first, Record)
        output.result(first, {"tokens": 3, "vector": [0.5, -1.0]})
        output.failure(Record(2, "request-2", None), "InvalidItem", "too long")
        output.failure(Record(3, "request-3", None), "TaskRevokedError", "expired")
        output.failure(Record(4, 4, None), "InvalidLine", "no custom_id")
        output.finish(complete=True)
    files = [tmp_path / "out.jsonl", tmp_path / "out.errors.jsonl"]
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "in.jsonl"])
    results, errors = ([json.loads(row) for row in f.read_text().splitlines()] for f in files)
    return results, errors, journal


def test_result_is_written_in_openai_s_form(tmp_path: Path) -> None:
    results, _, journal = run(tmp_path)
    job = journal.task_id(0, 1)
    assert results == [
        {
            "id": f"batch_req_{job.replace('-', '')}",
            "custom_id": "request-1",
            "response": {
                "status_code": 200,
                "request_id": job,
                "body": {
                    "object": "list",
                    "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
                    "model": "embed",
                    "usage": {"prompt_tokens": 3, "total_tokens": 3},
                },
            },
            "error": None,
        }
    ]


def test_failure_is_written_in_openai_s_form(tmp_path: Path) -> None:
    _, errors, _ = run(tmp_path)
    assert [each["custom_id"] for each in errors] == ["request-2", "request-3", None]
    assert errors[0]["response"]["status_code"] == 400
    assert errors[0]["response"]["body"] == {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": None,
            "code": "InvalidItem",
        }
    }
    assert errors[0]["error"] is None
    assert [each["response"] for each in errors[1:]] == [None, None]
    assert errors[1]["error"] == {"code": "batch_expired", "message": "expired"}
    assert errors[2]["error"]["code"] == "invalid_line"
    assert errors[2]["error"]["message"].endswith("in.jsonl, line 4: no custom_id")


def test_vectors_are_base64_if_the_request_says_so(tmp_path: Path) -> None:
    results, _, _ = run(tmp_path, encoding_format="base64")
    encoded = results[0]["response"]["body"]["data"][0]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(encoded)) == (0.5, -1.0)


def test_a_number_of_a_vector_that_json_lacks_is_nan_in_base64(tmp_path: Path) -> None:
    dataset = Dataset(write(tmp_path / "in.jsonl", [request(1)]))
    with Output(dataset, tmp_path / "out.jsonl") as output:
        output.open(Journal.of(dataset.sources, "embed", {}, 4))
        form = {"encoding_format": "base64"}
        output.result(Record(1, "request-1", None, form=form), [0.5, math.nan])
        output.finish(complete=True)
    body = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    content = base64.b64decode(body["data"][0]["embedding"])
    assert [str(each) for each in struct.unpack("<2f", content)] == ["0.5", "nan"]


def test_request_of_several_texts_gets_a_vector_for_each(tmp_path: Path) -> None:
    dataset = Dataset(write(tmp_path / "in.jsonl", [request(1, ["a", "b"])]))
    with Output(dataset, tmp_path / "out.jsonl") as output:
        output.open(Journal.of(dataset.sources, "embed", {}, 4))
        output.result(
            Record(1, "request-1", None, 0, 2), [{"tokens": 2, "vector": [n]} for n in (1, 2)]
        )
        output.finish(complete=True)
    body = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert [(each["index"], each["embedding"]) for each in body["data"]] == [(0, [1]), (1, [2])]
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_each_request_has_its_own_dimensions_and_encoding(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"dimensions": 2},
        {"encoding_format": "base64"},
        {"encoding_format": "float"},
    ]
    rows = [request(number, **body) for number, body in enumerate(asked)]
    dataset = Dataset(write(tmp_path / "in.jsonl", rows))
    records = [row for row in dataset if isinstance(row, Record)]
    assert [row.form for row in records] == [
        None,
        {"dimensions": 2},
        {"encoding_format": "base64"},
        None,
    ]
    with Output(dataset, tmp_path / "out.jsonl") as output:
        output.open(Journal.of(dataset.sources, "embed", {}, 4))
        for row in records:
            answer = Answer({"tokens": 2, "vector": [0.6, 0.0, 0.8]})
            output.result(row, in_form(answer, row.form or {}).value)
        output.finish(complete=True)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in lines]
    vectors = [body["data"][0]["embedding"] for body in bodies]
    assert vectors[0] == vectors[3] == [0.6, 0.0, 0.8]
    assert vectors[1] == [1.0, 0.0]
    assert len(base64.b64decode(vectors[2])) == 12
    assert {body["model"] for body in bodies} == {"embed"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"vector": [1.0, 0.0]}, "dimensions = 3: the model's vectors have 2"),
        ([{"vector": [1.0, 0.0, 0.0]}, {"vector": [1.0]}], "the model's vectors have 1"),
        ({"label": "good"}, "the task's result is no vector"),
    ],
)
def test_dimensions_that_the_model_has_not_are_an_error_of_that_line(value: Any, said: str) -> None:
    answer = in_form(Answer(value), {"dimensions": 3})
    assert answer.error is not None
    assert answer.error[0] == "InvalidItem"
    assert said in answer.error[1]


def test_a_vector_in_base64_is_cut_as_well() -> None:
    packed = base64.b64encode(struct.pack("<3f", 3.0, 4.0, 9.0)).decode()
    assert in_form(Answer({"vector": packed}), {"dimensions": 2}).value == {"vector": [3.0, 4.0]}


def test_a_vector_of_length_1_keeps_it() -> None:
    assert shortened([0.6, 0.0, 0.8], 1) == [1.0]
    assert shortened([3.0, 4.0], 1) == [3.0]


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_requests_have_no_table_of_answers(tmp_path: Path, name: str) -> None:
    dataset = Dataset(write(tmp_path / "in.jsonl", [request(1)]))
    with pytest.raises(DatasetError, match=rf"{name}: .* JSON lines"):
        Output(dataset, tmp_path / name)


@pytest.mark.parametrize("result", ["a text", {"label": 1}, ["a", "b"]])
def test_chat_of_a_task_that_generates_nothing_has_its_result_as_it_is(
    tmp_path: Path, result: Any
) -> None:
    row = {**request(1), "url": "/v1/chat/completions"}
    dataset = Dataset(write(tmp_path / "in.jsonl", [row]))
    with Output(dataset, tmp_path / "out.jsonl") as output:
        output.open(Journal.of(dataset.sources, "embed", {}, 4))
        output.result(Record(1, "a", None, form={"url": row["url"]}), result)
        output.finish(complete=True)
    body = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]
    assert body == (result if isinstance(result, dict) else {"result": result})
