"""Results as a Parquet file, a part of its rows at a time."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from celery.utils.functional import chunks

from batchery_producer.files.source import extra

Entries = Callable[[], Iterable[Mapping[str, Any]]]

#: Number of rows in memory at a time, and in a row group.
WRITE_ROWS = 4096

#: The columns, those that are there.
COLUMNS = ("id", "file", "row", "result")


def write_parquet(entries: Entries, file: BinaryIO) -> None:
    """Writes a table whose columns have types that hold all of their values.

    Where no type does, the column has JSON texts.

    Args:
        entries: Gives the rows, each time from the first.
        file: A file that can be written anew.
    """
    arrow = extra("pyarrow")
    errors = (arrow.ArrowException, OverflowError, ValueError, TypeError)
    types: dict[str, Any] = {}
    for batch in chunks(iter(entries()), WRITE_ROWS):
        for name in batch[0]:
            values = [each[name] for each in batch]
            try:
                types[name] = _join_types(types.get(name), arrow.array(values).type)
            except errors:
                types[name] = arrow.string()
    schema = arrow.schema([(name, types[name]) for name in COLUMNS if name in types])
    if not types:
        schema = arrow.schema({"id": arrow.null(), "row": arrow.int64(), "result": arrow.null()})
    try:
        _write(schema, entries, file)
    except errors:  # Integers of one part may be too large to stand beside the floats of another.
        file.seek(0)
        file.truncate()
        texts = [
            (each.name, each.type if each.name == "row" else arrow.string()) for each in schema
        ]
        _write(arrow.schema(texts), entries, file)


def _join_types(one: Any, other: Any) -> Any:
    arrow = extra("pyarrow")
    schemas = [arrow.schema({"column": each}) for each in (one, other) if each is not None]
    joined = arrow.unify_schemas(schemas, promote_options="permissive").field(0).type
    # An object without a single field cannot be written to a Parquet file.
    return arrow.string() if "struct<>" in str(joined) else joined


def _write(schema: Any, entries: Entries, file: BinaryIO) -> None:
    arrow = extra("pyarrow")
    with extra("pyarrow.parquet").ParquetWriter(file, schema) as writer:
        for batch in chunks(iter(entries()), WRITE_ROWS):
            columns = [
                arrow.array(_values(batch, each.name, each.type == arrow.string()), each.type)
                for each in schema
            ]
            writer.write_batch(arrow.record_batch(columns, schema=schema))


def _values(batch: Sequence[Mapping[str, Any]], name: str, are_texts: bool) -> list[Any]:
    values = [each[name] for each in batch]
    return [_as_text(each) for each in values] if are_texts else values


def _as_text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # UTF-8 has no lone surrogate.
