"""Fields of requests that several APIs have."""

from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

#: Maximum token id: that of every tokenizer is a signed number of 32 bits.
MAX_TOKEN_ID = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]

#: Name of a model in the query, for clients whose bodies have no place for it.
ModelName = Annotated[
    str | None,
    Query(description="Name or alias of a model; the first one that fits if missing."),
]


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


#: A text, token ids of the model's own tokenizer, or a list of either.
Inputs = Annotated[
    str | list[TokenId] | list[str | list[TokenId]],
    expected("a text, a list of token ids, or a list of either"),
    Field(
        description="A text, token ids of the model's own tokenizer, or a list of either.",
        examples=["the cat", ["the cat", "a dog"], [[101, 1996, 4937, 102], "a dog"]],
    ),
]


def _refuse(value: Any) -> Any:
    if value is None or value is False:
        return value
    raise ValueError("expected null or false, as it is not served here")


#: A field that would change the answer, and is not served.
Unserved = Annotated[Literal[False] | None, BeforeValidator(_refuse)]


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


#: Lets JSON write a whole number as 5.0.
WHOLE = BeforeValidator(_whole)
