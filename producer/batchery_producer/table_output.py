"""Results as Parquet and Arrow files: what types their columns have is found in a first pass."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, BinaryIO

from batchery_producer.extras import extra

Entries = Callable[[], Iterable[Mapping[str, Any]]]

#: Rows that are held in memory at a time, and that a row group has.
BATCH_ROWS = 4096


def write_parquet(entries: Entries, file: BinaryIO) -> None:
    """Writes a Parquet file."""
    _write(entries, lambda schema: extra("pyarrow.parquet").ParquetWriter(file, schema))


def write_arrow(entries: Entries, file: BinaryIO) -> None:
    """Writes an Arrow file."""
    _write(entries, lambda schema: extra("pyarrow.ipc").new_file(file, schema))


def _write(entries: Entries, create: Callable[[Any], Any]) -> None:
    arrow = extra("pyarrow")
    schema = _schema(entries())
    with create(schema) as writer:
        for batch in _batches(entries()):
            columns = [_column(field, batch) for field in schema]
            writer.write_batch(arrow.record_batch(columns, schema=schema))


def _schema(entries: Iterable[Mapping[str, Any]]) -> Any:
    """Every column has a type that holds all of its values; JSON text if there is none."""
    arrow = extra("pyarrow")
    fields: dict[str, Any] = {name: arrow.field(name, arrow.null()) for name in ("id", "line")}
    for batch in _batches(entries):
        for name in batch[0]:
            found = _field(name, batch)
            fields[name] = _joined(fields.get(name, found), found)
    order = [name for name in ("id", "file", "line", "result") if name in fields]
    return arrow.schema([fields[name] for name in order])


def _field(name: str, batch: Sequence[Mapping[str, Any]]) -> Any:
    arrow = extra("pyarrow")
    try:
        type_ = arrow.array([entry[name] for entry in batch]).type
        # An object without a single field cannot be written to a Parquet file.
        type_ = arrow.string() if "struct<>" in str(type_) else type_
    except (arrow.ArrowException, OverflowError, ValueError, TypeError):
        type_ = arrow.string()
    return arrow.field(name, type_)


def _joined(one: Any, other: Any) -> Any:
    arrow = extra("pyarrow")
    schemas = [arrow.schema([one]), arrow.schema([other])]
    try:
        return arrow.unify_schemas(schemas, promote_options="permissive").field(0)
    except (arrow.ArrowException, ValueError, TypeError):
        return arrow.field(one.name, arrow.string())


def _column(field: Any, batch: Sequence[Mapping[str, Any]]) -> Any:
    arrow = extra("pyarrow")
    values = [entry[field.name] for entry in batch]
    if field.type == arrow.string():
        values = [_text(value) for value in values]
    return arrow.array(values, type=field.type)


def _text(value: Any) -> str | None:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _batches(entries: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    rest = iter(entries)
    while batch := list(islice(rest, BATCH_ROWS)):
        yield batch
