"""Claim checks: bytes are put where workers read them, and jobs carry a reference instead.

A reference is an item as any other: `batchery:ID` for bytes in Redis, or a URL of a store. Small
items need none, as they travel with their message.
"""

import secrets
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import redis
from celery import Celery

from batchery.errors import BatcheryError, BrokerRefused, GaveUp, InvalidItem, SettingsError
from batchery.installation import get_media_settings
from batchery.retry import REFUSAL_MEANINGS, find_refusal
from batchery.transport.payloads import PREFIX, Payloads
from batchery_producer.files.source import find_remote, naming_errors

#: Maximum time that bytes are kept in Redis, in seconds.
MAX_EXPIRES_S = 365 * 86_400

#: The Redis of each app that has put something; one for all calls, as connecting takes longer.
_payloads: WeakKeyDictionary[Celery, Payloads] = WeakKeyDictionary()


def put_media(
    app: Celery,
    data: bytes | bytearray | memoryview,
    *,
    expires_s: float = 86_400,
    store: str | None = None,
) -> str:
    """Puts the bytes of a picture or a sound where workers read them.

    Args:
        app: Workers of this app get the reference. Its result backend's Redis gets the bytes, or
            else that of its broker.
        data: The bytes of a file; up to the setting `media.max_bytes`.
        expires_s: How long Redis keeps them, in seconds; 0.001 or more, up to a year. They must be
            there until the job has its result.
        store: A folder of fsspec's, such as `s3://bucket/calls`, in the place of Redis. Nothing
            removes what is put there; workers need `s3://bucket` in their setting `media.hosts`.

    Returns:
        The item for `delay`: `batchery:ID`, or the URL of the new file.

    Raises:
        InvalidItem: There are no bytes, too many, or `expires_s` is out of range.
        SettingsError: Neither result backend nor broker is a Redis.
        BrokerRefused: Redis has no memory left, or refuses this user.
        GaveUp: Redis does not answer.
        DatasetError: The store cannot be reached, or its package is missing.
    """
    maximum = get_media_settings(app).max_bytes
    if not isinstance(data, bytes | bytearray | memoryview) or not 0 < len(data) <= maximum:
        given = f"{len(data)} bytes" if isinstance(data, bytes) else f"{data!r:.40}"
        raise InvalidItem(f"data is {given}; expected 1 to media.max_bytes = {maximum} bytes")
    if not 0.001 <= expires_s <= MAX_EXPIRES_S:
        raise InvalidItem(f"expires_s = {expires_s!r:.40}: expected 0.001 to {MAX_EXPIRES_S} s")
    # Whoever guessed one could use another's bytes.
    media_id = secrets.token_urlsafe()
    if store is None:
        _call(app, "set", media_id, bytes(data), px=int(expires_s * 1000))
        return f"{PREFIX}{media_id}"
    url = f"{store.rstrip('/')}/{media_id}"
    remote = find_remote(url)
    with naming_errors(url):
        remote.fs.pipe_file(remote.path, bytes(data))
    return url


def remove_media(app: Celery, reference: str) -> None:
    """Removes bytes from Redis that `put_media` put there; if it does not answer, they expire."""
    with suppress(BatcheryError):
        _call(app, "unlink", reference.removeprefix(PREFIX))


def _call(app: Celery, command: str, media_id: str, *arguments: Any, **options: Any) -> None:
    payloads = _payloads.get(app) or Payloads.open(app)
    if payloads is None:
        raise SettingsError(
            f"app {app.main!r}: neither result backend nor broker is a Redis, which would keep the"
            " bytes; name a store"
        )
    _payloads[app] = payloads
    try:
        getattr(payloads.client, command)(payloads.key(media_id), *arguments, **options)
    except redis.RedisError as error:
        if word := find_refusal(error):
            raise BrokerRefused(f"media: Redis {REFUSAL_MEANINGS[word]} ({error})") from error
        raise GaveUp(f"media: Redis does not answer: {error}") from error
