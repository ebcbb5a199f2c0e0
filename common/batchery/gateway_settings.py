"""The settings of `batchery serve`: the table `[gateway]`."""

import re
from functools import lru_cache
from ipaddress import ip_address

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

#: A key as it is kept: `batchery key` prints it.
HASH = re.compile(r"sha256:[0-9a-f]{64}")

#: What webhooks are signed with: base64 of 24 to 64 bytes, as Standard Webhooks has it.
WEBHOOK_SECRET = r"^whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"

#: Queue of webhooks, whose workers run batch files, too.
JOBS_QUEUE = "batchery.gateway"

#: Of a setting that there is for all, too.
ALONE = "As the setting of that name, for this key alone."


class KeySettings(BaseModel):
    """One API key: who calls, and how much."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    hash: str = Field(
        pattern=HASH.pattern, description="SHA-256 of the key; `batchery key` prints it."
    )
    webhook_secret: str | None = Field(
        None,
        pattern=WEBHOOK_SECRET,
        repr=False,
        description="Signs its webhooks; `batchery key` prints one. As secret as a key.",
    )
    tenant: str | None = Field(
        None, max_length=200, description="For whom its jobs run; the key's own name if unset."
    )
    priority_class: str | None = Field(
        None, alias="class", description="One of `classes`; that of priority 0 if unset."
    )
    max_concurrency: PositiveInt | None = Field(None, description=ALONE)
    max_items: PositiveInt | None = Field(None, description=ALONE)
    max_chars: PositiveInt | None = Field(None, description=ALONE)
    max_stored_bytes: PositiveInt | None = Field(None, description=ALONE)
    max_open_batches: PositiveInt | None = Field(None, description=ALONE)


class GatewaySettings(BaseModel):
    """What the HTTP gateway serves, to whom, and how much of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        "127.0.0.1", description="Address to listen on; beyond loopback only with `keys`."
    )
    port: NonNegativeInt = Field(8000, le=65535, description="Port; 0 is any free one.")
    processes: PositiveInt = Field(
        1, le=64, description="Processes side by side, each with limits of its own."
    )
    worker: bool = Field(
        True,
        description="Whether `batchery serve` runs batch files and webhooks by a worker of its"
        " own; without it, another worker must have the queue `batchery.gateway`.",
    )
    keys: dict[str, KeySettings] = Field(
        {}, description="API keys by name; without any, only loopback is served."
    )
    timeout_s: PositiveFloat = Field(
        60,
        le=3600,
        description="How long a request waits for its results; the header"
        " `X-Request-Timeout` asks for less.",
    )
    stream_timeout_s: PositiveFloat = Field(
        600,
        description="How long a stream that has begun may have nothing new, as while a worker"
        " comes back and loads its model; `X-Request-Timeout` asks for less.",
    )
    worker_grace_s: NonNegativeFloat = Field(
        15,
        description="How long a model's queue may be without any worker, in seconds; then its"
        " requests are answered 503 at once. At least what a worker takes to load its models;"
        " where workers start on demand, what that takes.",
    )
    max_items: PositiveInt = Field(2048, description="Maximum items of a request.")
    max_chars: PositiveInt = Field(
        4_000_000, description="Maximum characters of all texts of a request."
    )
    max_body_bytes: PositiveInt = Field(
        16_777_216, description="Maximum bytes of a body, except of files."
    )
    max_file_bytes: PositiveInt = Field(209_715_200, description="Maximum bytes of a file.")
    max_stored_bytes: PositiveInt = Field(
        10_737_418_240,
        description="Maximum bytes of all files of one key or tenant; uploads beyond are refused.",
    )
    max_open_batches: PositiveInt = Field(
        100, description="Batches of one key or tenant that are not over."
    )
    body_timeout_s: PositiveFloat = Field(
        30, description="How long a caller may take for the body of a request."
    )
    max_concurrency: PositiveInt = Field(
        4096, description="Requests in flight of one key; more are answered 429."
    )
    hosts: list[str] = Field(
        [],
        description="Host names that requests may ask for; without keys, those of loopback,"
        " so that no web page reaches the gateway by a name of its own.",
    )
    tasks: list[str] = Field(
        [], description="Batch tasks for `POST /tasks/NAME`; `*` at an end is any of the app's."
    )
    webhook_hosts: list[str] = Field(
        [],
        description="Hosts to which results may be posted: names, and addresses or networks."
        " A name that leads to a private address needs that address, too.",
    )
    files: str = Field(
        "batchery-files",
        min_length=1,
        description="Where OpenAI's files are kept: folder or fsspec URL.",
    )

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
