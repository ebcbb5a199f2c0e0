"""Every decoder of what comes from outside: what it is given, and which errors it may raise.

`test_decoders.py` tries each of them in the suite, for seconds; `make fuzz` for half an hour. What
device processes send is left out: they run the app's own code, and are trusted as it is.
"""

import asyncio
import importlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow
import zstandard
from celery import Celery
from celery.exceptions import InvalidTaskError
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from batchery.cli import dead_letters as dead_letter_command
from batchery.cli.console import printable, render
from batchery.cli.stats import draw
from batchery.cli.survey import Survey
from batchery.errors import DatasetError, InvalidItem
from batchery.protocol import headers
from batchery.transport import codec, dead_letters, live_workers, suspects
from batchery_producer import answers, collector
from batchery_producer.files import rows
from batchery_producer.files.journal import FinishedRows, Journal
from batchery_producer.files.json_lines import read_lines
from batchery_producer.files.source import DAMAGES, decompressed
from batchery_producer.gateway import bodies
from batchery_producer.gateway.app import list_routes
from batchery_producer.gateway.batch_run import ROUTES
from batchery_producer.gateway.problems import Problem, validate
from batchery_producer.gateway.routes.tei import HANDLERS
from batchery_worker.consumer import check
from batchery_worker.device import inbox

#: Maximum number of rows that are read of one file: a few bytes can be very many rows.
MAX_ROWS = 2000


class Decoder(NamedTuple):
    """A decoder.

    Attributes:
        run: Is given any bytes.
        errors: What it may raise, by its documentation.
        examples: Valid inputs, from which others are made; and what was found, and mended.
        is_bounded: Whether its memory is bounded by its input, and measured. pyarrow believes the
            lengths in its files.
    """

    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = ()
    examples: tuple[bytes, ...] = ()
    is_bounded: bool = True


def given_json(run: Callable[[Any], object]) -> Callable[[bytes], object]:
    """A decoder of JSON's values as one of bytes; what is no JSON does not reach it."""

    def decode(data: bytes) -> object:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return run(value)

    return decode


# Messages


MESSAGE = json.dumps(
    {
        "body": "W1sieCJdLCB7fSwge31d",
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {
            "id": "7",
            "task": "t",
            "retries": 0,
            "timelimit": [None, 1.5],
            "stamps": {},
            "argsrepr": "('x',)",
            "batchery": {"v": 1, "n": 2, "reply": "r", "keep_s": 9},
            "batchery_deadline": 1.5,
            "batchery_tenant": "t",
            "batchery_sent_at": 1.5,
        },
        "properties": {"delivery_tag": "t", "delivery_info": {"routing_key": "q"}},
    }
).encode()

BODY = b'[["x"], {"a": 1}, {"callbacks": [{"task": "t"}], "chord": null, "chain": []}]'


def read_message(data: bytes) -> object:
    """What a channel reads of a message, and what is kept of one that it cannot read."""
    dead_letters.readable_headers(data)
    printable(data.decode(errors="backslashreplace"))
    letter = dead_letters.DeadLetter("1", "why", 1.5, "7", "t", "q")
    dead_letter_command.describe(letter, data)
    payload = codec.read_json(data)
    payload["properties"].get("delivery_tag")
    return suspects.build_suspect_field(payload)


def read_headers(value: Any) -> None:
    """What is read of the headers of callers; each by itself."""
    if not isinstance(value, Mapping):
        value = {"batchery": value, headers.DEADLINE: value, headers.TENANT: value}
        value[headers.SENT_AT] = value["batchery"]
    header = value.get("batchery")
    headers.read_sent_at(value, 2e9)
    headers.read_stream_name(header)
    headers.read_keep_s(header)
    headers.is_streamed(header)
    for read in (headers.read_deadline, headers.read_tenant):
        with suppress(InvalidItem):
            read(value)
    with suppress(InvalidItem):
        headers.read_items([1, 2], header)


def check_job(value: Any) -> None:
    """What a worker makes sure of before Celery reads a message."""
    pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
    check(SimpleNamespace(headers=pair[0], payload=pair[1]))
    dead_letters.read_embed(json.dumps(pair[1]))


def read_worker(data: bytes) -> None:
    """What workers and gateways read of a worker's entry."""
    live_workers.read_worker(data)


def show_figures(value: Any) -> str:
    """What `batchery stats` makes of a worker's answer."""
    if not isinstance(value, dict):
        value = {"error": value}
    now = Survey({"w": value}, {"q": 1}, 1)
    json.dumps(now.report())
    return render(draw(now))


FIGURES = json.dumps(
    {
        "clock_s": 1.5,
        "queues": ["q"],
        "devices": {
            "cpu": {
                "state": "ready",
                "batches_in_flight": 0,
                "pid": 7,
                "memory": {"total_bytes": 9},
                "models": {"m": {"max_batch_tokens": 9, "token_us": 1.5, "fitted_batches": 2}},
            }
        },
        "batches": {"jobs": 2, "items": 2, "batches": 1, "tracer_jobs": {"why": 1}},
        "costs": {"t": {"item_us": 1.5, "pass_ms": 1, "batches": 2}},
    }
).encode()


# Results


@cache
def redis_app() -> Any:
    """An app that connects to nothing."""
    return Celery("fuzz", backend="redis://localhost:1/0", set_as_current=False)


RESULT = json.dumps(
    {
        "status": "SUCCESS",
        "result": [{"ok": 1}, {"error": {"type": "E", "message": "m"}}],
        "traceback": None,
        "task_id": "7",
        "batch": {"id": "b1", "size": 2, "forward_ms": 1.5, "device": "cpu"},
    }
).encode()
FAILURE = json.dumps(
    {
        "status": "FAILURE",
        "result": {"exc_type": "ValueError", "exc_message": ["m"], "exc_module": "builtins"},
        "task_id": "7",
    }
).encode()


def read_result(data: bytes) -> None:
    """What a client reads of a stored result."""
    backend = redis_app().backend
    answer = collector.read_stored(backend, data)
    for items, is_multi_item in ((1, False), (2, True)):
        if answer is not None:
            answers.read_outcomes(answer, range(items), is_multi_item, backend)


# Files


def read_rows(make: Callable[[Any], Iterator[Any]]) -> Callable[[bytes], object]:
    """Reads the rows of a file."""

    def read(data: bytes) -> object:
        rows_ = make(decompressed(io.BufferedReader(io.BytesIO(data))))
        return list(islice(rows_, MAX_ROWS))

    return read


def table(writer: str) -> bytes:
    """A small file of pyarrow's, by the name of its writer."""
    module, _, name = writer.rpartition(".")
    rows_ = pyarrow.table({"id": [1, 2], "text": ["a", None]})
    file = pyarrow.BufferOutputStream()
    with getattr(importlib.import_module(f"pyarrow.{module}"), name)(file, rows_.schema) as made:
        made.write_table(rows_)
    return bytes(file.getvalue())


def read_csv(stream: Any) -> Iterator[Any]:
    """As a bulk run reads it: with the delimiter that its first bytes show."""
    delimiter = rows.find_delimiter(stream.peek(4096))
    return rows.read_csv(rows.split_lines(stream), delimiter=delimiter)


def read_journal(data: bytes) -> None:
    """The two files by which a bulk run goes on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file.jsonl")
        path.write_bytes(data)
        with suppress(DatasetError):
            Journal.read(path)
        finished = FinishedRows(["a"])
        for entry, _ in read_lines(path):
            finished.note(entry, path)


def read_request(value: Any) -> None:
    """The body of a line of a file of OpenAI's batch API."""
    said = value.get("body") if isinstance(value, dict) else value
    body = said if isinstance(said, dict) else {"input": said}
    for _, form, _ in ROUTES.values():
        with suppress(RequestValidationError):
            validate(form, {"model": "m", **body})


REQUEST = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/embeddings",
        "body": {"model": "m", "input": ["x", "y"], "encoding_format": "float", "dimensions": 3},
    }
).encode()
CHAT = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    }
).encode()


# Gateway


@cache
def body_models() -> list[Any]:
    """The form of each body that a route takes."""
    models = [form for form, _ in HANDLERS.values()]
    fields = (getattr(route, "body_field", None) for route in list_routes())
    kinds = [field.field_info.annotation for field in fields if field is not None]
    return [*models, *(kind for kind in kinds if hasattr(kind, "model_validate"))]


def read_body(data: bytes) -> None:
    """A body of JSON, by every route."""
    value = asyncio.run(bodies.parse(data))
    for model in body_models():
        with suppress(ValidationError):
            model.model_validate(value)


EMBEDDINGS = b'{"model": "m", "input": ["x"], "encoding_format": "base64", "dimensions": 3}'
CHAT_BODY = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": true}'

FILE_ERRORS: tuple[type[Exception], ...] = (
    *(DatasetError, OSError, *DAMAGES),
    *(zstandard.ZstdError, pyarrow.ArrowException),
)

DECODERS: Mapping[str, Decoder] = {
    "message": Decoder(read_message, inbox.MALFORMED, (MESSAGE, b'{"properties": {}}')),
    "headers": Decoder(
        given_json(read_headers),
        (),
        (
            json.dumps(json.loads(MESSAGE)["headers"]).encode(),
            # Larger than any float.
            b'{"batchery_deadline": 1%b}' % (b"0" * 400),
            b'{"batchery_sent_at": 1%b}' % (b"0" * 400),
        ),
    ),
    "job": Decoder(
        given_json(check_job),
        (InvalidTaskError,),
        (b"[%b, %b]" % (json.dumps(json.loads(MESSAGE)["headers"]).encode(), BODY), BODY),
    ),
    "worker entry": Decoder(
        read_worker,
        (),
        (
            b'{"host": "h", "pid": 7, "expiry_s": 5.0, "queues": ["q"], "name": "w@h"}',
            b'{"expiry_s": 1%b}' % (b"0" * 400),
            b"[" * 100_000,
        ),
    ),
    "figures": Decoder(given_json(show_figures), (), (FIGURES,)),
    "result": Decoder(
        read_result,
        (),
        (
            RESULT,
            FAILURE,
            b"[]",
            b'{"status": "FAILURE", "result": {"exc_type": "system", "exc_module": "os"}}',
        ),
    ),
    "jsonl": Decoder(
        read_rows(lambda file: rows.read_json(rows.split_lines(file))), FILE_ERRORS, (REQUEST,)
    ),
    "csv": Decoder(read_rows(read_csv), FILE_ERRORS, (b'id;text\n1;"a\nb"\n2;c', b"a,b\n1,2\n")),
    "text": Decoder(read_rows(lambda file: rows.read_text(rows.split_lines(file))), FILE_ERRORS),
    "arrow": Decoder(
        read_rows(lambda stream: rows.read_table(stream, "arrow")),
        FILE_ERRORS,
        # The third has a text that begins beyond the end of all texts, the last one a column whose
        # name is no UTF-8.
        (
            table("ipc.new_file"),
            table("ipc.new_stream"),
            table("ipc.new_stream").replace(
                b"\0\0\0\0\1\0\0\0\1\0\0\0", b"\0\0\0\0\1\0\0\7\1\0\0\7"
            ),
            table("ipc.new_file").replace(b"text", b"tex\xc7"),
        ),
        is_bounded=False,
    ),
    "parquet": Decoder(
        read_rows(lambda stream: rows.read_table(stream, "parquet")),
        FILE_ERRORS,
        (table("parquet.ParquetWriter"),),
        is_bounded=False,
    ),
    "journal": Decoder(
        read_journal,
        (DatasetError,),
        (
            b'{"v": 2, "run": "0123456789abcdef", "task": "t", "settings": {}, "files": ["a"],'
            + b' "fingerprints": []}\n',
            b"[" * 2000,
            b'{"id": 1, "row": 3, "result": "x"}\n{"id": 2, "row": 4, "error": {}}\n',
        ),
    ),
    "request": Decoder(given_json(read_request), (), (REQUEST, CHAT)),
    "body": Decoder(read_body, (Problem,), (EMBEDDINGS, CHAT_BODY, b'{"inputs": ["x"]}', REQUEST)),
}
