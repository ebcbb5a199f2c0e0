"""Who calls: API keys, the tenant and class of each, and how much it may ask for."""

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from batchery.errors import SettingsError
from batchery.settings import Settings
from batchery_producer.gateway.problems import Kind, Problem

#: Beginning of a key, so that scanners of repositories find one that was committed.
KEY_PREFIX = "sk-batchery-"

#: Random bytes of a key; so many can't be guessed, and a plain hash hides them.
KEY_BYTES = 32

#: What a key may limit more closely than the gateway does.
LIMITS = ("max_concurrency", "max_items", "max_chars", "max_stored_bytes", "max_open_batches")

#: Name of the caller where there are no keys.
ANYONE = "anyone"


def make_key() -> tuple[str, str]:
    """A new key, and its hash for the settings."""
    key = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    return key, hash_key(key)


def make_webhook_secret() -> str:
    """A new secret, as Standard Webhooks has it."""
    return f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"


def hash_key(key: str) -> str:
    """What is kept of a key."""
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


#: How many characters a request may make of each byte of its body, by what goes with each of its
#: items, such as a query or options; and as many as any request may.
MAX_COPIES, COPIED_CHARS = 8, 250_000


@dataclass(slots=True)
class Caller:
    """Who calls, and how much they may ask for.

    Attributes:
        name: Name of the key.
        tenant: For whom the jobs run; None for nobody in particular.
        priority: Celery's priority of the jobs; None for that of the task.
        max_concurrency: Requests in flight.
        max_items: Items of one request.
        max_chars: Characters of all texts of one request.
        max_stored_bytes: Bytes of all files.
        max_open_batches: Batches that are not over.
        in_flight: Requests from their head until their answer is read, in this process.
        long_work: Held while a thread works on one of them.
    """

    name: str
    tenant: str | None
    priority: int | None
    max_concurrency: int
    max_items: int
    max_chars: int
    in_flight: int = field(default=0, compare=False)
    max_stored_bytes: int = 0
    max_open_batches: int = 0
    long_work: asyncio.Lock = field(default_factory=asyncio.Lock, compare=False)

    def check(self, items: int, chars: int, came_bytes: int | None = None) -> None:
        """Makes sure that a request is not too large, and does not make a large one of itself.

        Args:
            items: How many items it has.
            chars: Of all items, as they are sent.
            came_bytes: Of the request, as it came; None where each item came by itself.

        Raises:
            Problem: It is; names the limit.
        """
        if items > self.max_items:
            raise Problem(
                Kind.TOO_LARGE,
                f"{items} items are more than max_items = {self.max_items} of one request;"
                " send several requests, or a file as a batch",
            )
        if chars > self.max_chars:
            raise Problem(
                Kind.TOO_LARGE,
                f"{chars} characters are more than max_chars = {self.max_chars} of one request",
            )
        longest = chars if came_bytes is None else max(COPIED_CHARS, MAX_COPIES * came_bytes)
        if chars > longest:
            raise Problem(
                Kind.TOO_LARGE,
                f"what all items share goes with each of them, which makes {chars} characters, more"
                f" than {longest}; send several requests, or shorter options",
            )


class Callers:
    """Finds the caller of a request by its key."""

    def __init__(self, settings: Settings) -> None:
        """Reads the keys.

        Raises:
            SettingsError: A key has a class that is not there.
        """
        gateway, by_hash = settings.gateway, {}
        limits = {limit: getattr(gateway, limit) for limit in LIMITS}
        for name, key in gateway.keys.items():
            found = settings.classes.get(key.priority_class or "")
            if key.priority_class is not None and found is None:
                raise SettingsError(
                    f"setting gateway.keys.{name}.class = {key.priority_class!r}: no such class;"
                    f" there are {', '.join(settings.classes)}"
                )
            tenant = name if key.tenant is None else key.tenant
            own = {limit: getattr(key, limit) or limits[limit] for limit in LIMITS}
            by_hash[key.hash] = Caller(name, tenant, found.level if found else None, **own)
        self._by_hash = by_hash
        self._anyone = None if gateway.keys else Caller(ANYONE, None, None, **limits)

    @property
    def have_keys(self) -> bool:
        """Whether callers need a key."""
        return self._anyone is None

    def identify_caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller of a request, by its headers in lower case.

        Raises:
            Problem: It has no key, or a wrong one.
        """
        if self._anyone is not None:
            return self._anyone
        given = headers.get(b"authorization", b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
        caller = self._by_hash.get(hash_key(key.strip())) if scheme.lower() == "bearer" else None
        if caller is None:
            what = "wrong API key" if key else "no API key"
            raise Problem(
                Kind.UNAUTHORIZED,
                f"{what}: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return caller
