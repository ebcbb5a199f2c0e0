"""Fields and bodies of requests that say what is wrong with them in one sentence."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema

#: Maximum values of a body: parsing and checking as many takes some milliseconds, for which the
#: event loop stands still. OpenAI takes as many token ids.
MAX_VALUES = 300_000

#: A list or an object counts as so many values, as it takes as much time and memory.
CONTAINER_VALUES = 5


def count_values(pieces: Iterable[bytes]) -> Iterator[int]:
    """How many values there are in JSON up to the end of each of its pieces."""
    count, is_text, rest = 0, False, b""
    for each in pieces:
        # A quote within a text comes behind a backslash that does not come behind another.
        piece = (rest + each).replace(b"\\\\", b"").replace(b'\\"', b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        # Quotes stand between texts and what is not, and a text may have commas and brackets, too.
        parts = piece.split(b'"')
        bare = b"".join(parts[is_text::2])
        is_text ^= len(parts) % 2 == 0
        count += bare.count(b",") + CONTAINER_VALUES * (bare.count(b"[") + bare.count(b"{"))
        yield count


def _fail_fast(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "dict"):
            schema["fail_fast"] = True
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return
    for part in schema:
        _fail_fast(part)


class RequestBody(BaseModel):
    """A body, or an object in one: of JSON's own types, and wrong by its first error alone."""

    model_config = ConfigDict(strict=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """The schema of a class, in which no list goes on after an item that is wrong."""
        schema = handler(source)
        _fail_fast(schema)
        return schema


def expected(what: str) -> WrapValidator:
    """Tells in one sentence what a field may be, not what each of its types lacks."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            places = [part for part in error.errors()[-1]["loc"] if isinstance(part, int)]
            where = f" (see item {places[0]})" if places else ""
            raise ValueError(f"expected {what}{where}") from None

    return WrapValidator(check)


def _refuse(value: Any) -> Any:
    if value is None or value is False:
        return value
    raise ValueError("expected null or false, as it is not served here")


#: A field that would change the answer, and is not served.
Unserved = Annotated[Literal[False] | None, BeforeValidator(_refuse)]
