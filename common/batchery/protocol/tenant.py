"""Tenants: for whom a job runs, as its caller says.

The message header `batchery_tenant: "acme"` names one. Jobs without it are of one more tenant, the
empty name. Stock workers ignore the header.
"""

from collections.abc import Mapping
from typing import Any

from batchery.errors import InvalidItem

HEADER = "batchery_tenant"

#: Maximum length of a name; workers remember it for each tenant that has jobs.
MAX_CHARS = 200


def read_tenant(message: Mapping[str, Any]) -> str:
    """The tenant of a message, by its headers.

    Raises:
        InvalidItem: The header is no name.
    """
    name = message.get(HEADER)
    if name is None:
        return ""
    if not isinstance(name, str) or len(name) > MAX_CHARS:
        raise InvalidItem(
            f"header {HEADER} is {name!r:.80}; expected a name of at most {MAX_CHARS} characters"
        )
    return name


def with_tenant(options: Mapping[str, Any], tenant: str | None) -> dict[str, Any]:
    """Options of `apply_async` whose headers name a tenant; the same ones for None.

    Raises:
        InvalidItem: It is no name.
    """
    if tenant is None:
        return dict(options)
    headers = {**(options.get("headers") or {}), HEADER: tenant}
    read_tenant(headers)
    return {**options, "headers": headers}
