"""Fields and bodies of requests that say what is wrong with them in one sentence."""

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
