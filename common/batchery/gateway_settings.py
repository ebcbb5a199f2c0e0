"""The settings of `batchery serve`: the table `[gateway]`."""

import re
from functools import lru_cache
from ipaddress import ip_address
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

#: A key as it is kept: `batchery key` prints it.
HASH = re.compile(r"sha256:[0-9a-f]{64}")

#: Queue of the gateway's own jobs: turns of batch files, and attempts of webhooks.
JOBS_QUEUE = "batchery.gateway"


class KeySettings(BaseModel):
    """One API key: who calls, and how much."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    hash: Annotated[
        str,
        Field(pattern=HASH.pattern, description="SHA-256 of the key; `batchery key` prints it."),
    ]
    tenant: Annotated[
        str | None,
        Field(max_length=200, description="For whom its jobs run; the key's own name if unset."),
    ] = None
    priority_class: Annotated[
        str | None,
        Field(alias="class", description="One of `classes`; that of priority 0 if unset."),
    ] = None
    max_concurrency: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this key alone.")
    ] = None
    max_items: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this key alone.")
    ] = None
    max_chars: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this key alone.")
    ] = None
    max_stored_bytes: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this key alone.")
    ] = None
    max_open_batches: Annotated[
        int | None, Field(gt=0, description="As the setting of that name, for this key alone.")
    ] = None


class GatewaySettings(BaseModel):
    """What the HTTP gateway serves, to whom, and how much of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Annotated[
        str, Field(description="Address to listen on; beyond loopback only with `keys`.")
    ] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="Port; 0 is any free one.")] = 8000
    processes: Annotated[
        int, Field(gt=0, le=64, description="Processes side by side, each with limits of its own.")
    ] = 1
    worker: Annotated[
        bool,
        Field(
            description="Whether `batchery serve` runs batch files and webhooks by a worker of its"
            " own; without it, another worker must have the queue `batchery.gateway`."
        ),
    ] = True
    keys: Annotated[
        dict[str, KeySettings],
        Field(description="API keys by name; without any, only loopback is served."),
    ] = {}
    timeout_s: Annotated[
        float,
        Field(
            gt=0,
            le=3600,
            description="How long a request waits for its results; the header"
            " `X-Request-Timeout` asks for less.",
        ),
    ] = 60
    stream_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="How long a stream that has begun may have nothing new, as while a worker"
            " comes back and loads its model; `X-Request-Timeout` asks for less.",
        ),
    ] = 600
    worker_grace_s: Annotated[
        float,
        Field(
            ge=0,
            description="How long a model's queue may be without any worker, in seconds; then its"
            " requests are answered 503 at once. At least what a worker takes to load its models;"
            " where workers start on demand, what that takes.",
        ),
    ] = 15
    max_items: Annotated[int, Field(gt=0, description="Maximum items of a request.")] = 2048
    max_chars: Annotated[
        int, Field(gt=0, description="Maximum characters of all texts of a request.")
    ] = 4_000_000
    max_body_bytes: Annotated[
        int, Field(gt=0, description="Maximum bytes of a body, except of files.")
    ] = 16_777_216
    max_file_bytes: Annotated[int, Field(gt=0, description="Maximum bytes of a file.")] = (
        209_715_200
    )
    max_stored_bytes: Annotated[
        int,
        Field(
            gt=0,
            description="Maximum bytes of all files of one key or tenant; uploads beyond are"
            " refused.",
        ),
    ] = 10_737_418_240
    max_open_batches: Annotated[
        int, Field(gt=0, description="Batches of one key or tenant that are not over.")
    ] = 100
    body_timeout_s: Annotated[
        float, Field(gt=0, description="How long a caller may take for head and body of a request.")
    ] = 30
    send_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="How long a caller may read nothing of an answer before it is cut off.",
        ),
    ] = 60
    max_concurrency: Annotated[
        int, Field(gt=0, description="Requests in flight of one key; more are answered 429.")
    ] = 4096
    hosts: Annotated[
        list[str],
        Field(
            description="Host names that requests may ask for; without keys, those of loopback,"
            " so that no web page reaches the gateway by a name of its own."
        ),
    ] = []
    cors_origins: Annotated[
        list[str], Field(description="Web pages of these origins may call; `*` is any.")
    ] = []
    tasks: Annotated[
        list[str],
        Field(
            description="Tasks that `POST /tasks/NAME` may call; `*` at an end is any of the app's."
        ),
    ] = []
    webhook_hosts: Annotated[
        list[str],
        Field(
            description="Hosts to which results may be posted: names, and addresses or networks."
            " A name that leads to a private address needs that address, too."
        ),
    ] = []
    files: Annotated[
        str, Field(min_length=1, description="Where OpenAI's files are kept: folder or fsspec URL.")
    ] = "batchery-files"

    @field_validator("keys")
    @classmethod
    def _one_name_per_key(cls, keys: dict[str, KeySettings]) -> dict[str, KeySettings]:
        if len({key.hash for key in keys.values()}) < len(keys):
            raise ValueError("two keys have the same hash; make another one by `batchery key`")
        return keys


@lru_cache(64)
def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone, by its name."""
    bare = host.strip("[]")
    if bare.lower() == "localhost":
        return True
    try:
        return ip_address(bare).is_loopback
    except ValueError:
        return False
