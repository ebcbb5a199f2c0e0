"""The errors of each route in `/openapi.json`."""

from collections import defaultdict
from typing import Any

from batchery_producer.gateway.guard import needs_no_key
from batchery_producer.gateway.problems import FORMS, ErrorFormat, Kind, choose_error_format

#: What each kind of problem means to a caller.
MEANINGS = {
    Kind.INVALID: "The request, or one of its items, is wrong.",
    Kind.EMPTY: "There is nothing to do.",
    Kind.TOO_LARGE: "Too many items, characters or bytes.",
    Kind.HEAD_TOO_LARGE: "Its headers are too large.",
    Kind.TOO_SLOW: "The body did not come in time.",
    Kind.NOT_JSON: "The headers say that the body is no JSON, or compressed.",
    Kind.UNAUTHORIZED: "No key, or a wrong one.",
    Kind.FORBIDDEN: "This host is not served.",
    Kind.NOT_FOUND: "There is nothing of this name.",
    Kind.UNSUPPORTED: "No model can do this.",
    Kind.OVERLOADED: "Too many requests; come again after `Retry-After`.",
    Kind.FAILED: "The model failed.",
    Kind.UNAVAILABLE: "Redis is away.",
    Kind.TIMEOUT: "No result in time.",
}

REF = "#/components/schemas/"


def describe_errors(schema: dict[str, Any]) -> dict[str, Any]:
    """Adds to each route how its API tells errors; what a route says itself stays.

    Args:
        schema: OpenAPI, as FastAPI makes it. It is changed.
    """
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    for form in FORMS.values():
        body = form.schema.model_json_schema(ref_template=REF + "{model}")
        schemas.update(body.pop("$defs", {}))
        schemas[form.schema.__name__] = body
    for path, methods in schema["paths"].items():
        errors = list_responses(choose_error_format(path))
        for operation in methods.values():
            own = operation["responses"]
            if FRAMEWORK_BODY in str(own.get("422")):
                del own["422"]
            operation["responses"] = {**errors, **own}
    return schema


def describe_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose routes need a key, but for those that need none.

    Args:
        schema: As from `describe_errors`.
    """
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    for path, methods in schema["paths"].items():
        if needs_no_key(path) and "get" in methods:
            methods["get"]["security"] = []
    components = {**schema["components"], "securitySchemes": schemes}
    return {**schema, "components": components, "security": [{name: []} for name in schemes]}


#: How FastAPI would tell that a request is wrong, which it never does here.
FRAMEWORK_BODY = "HTTPValidationError"


def list_responses(form: ErrorFormat) -> dict[str, Any]:
    """The errors of an API by their status."""
    meanings = defaultdict(list)
    for kind, meaning in MEANINGS.items():
        meanings[form.get_status(kind)].append(meaning)
    content = {"application/json": {"schema": {"$ref": REF + form.schema.__name__}}}
    return {
        str(status): {"description": " ".join(meanings[status]), "content": content}
        for status in sorted(meanings)
    }
