"""Where the broker may be: a unix socket, behind a password, TLS or Sentinel."""

import contextlib
from pathlib import Path
from typing import Any

from redis import Redis

from support.lessee import Lessee
from support.own_redis import OwnRedis
from support.plain_kombu import send

#: What a user needs for the leases, beside the keys.
RIGHTS = "+@read +@write +@pubsub +@connection +@scripting +@transaction +info +time"


def serves(url: str, **options: Any) -> None:
    """Sends, leases, waits, is woken, settles and gives back."""
    send(url, "q", "1", "2", transport=None)
    with contextlib.closing(Lessee(url, "q", **options)) as lessee:
        assert lessee.get(2) == ["1", "2"]
        lessee.until_waiting()
        send(url, "q", "3", transport=None)
        lessee.get(3)
        lessee.ack(0)
    with contextlib.closing(Lessee(url, "q", **options)) as lessee:
        assert lessee.get(2) == ["2", "3"]
        lessee.ack(0)
        lessee.ack(1)


def running(directory: Path, binary: Path, **options: str) -> OwnRedis:
    return OwnRedis(directory, binary, appendonly="no", **options)


def test_a_unix_socket(tmp_path: Path, every_redis: OwnRedis) -> None:
    path = tmp_path / "socket"
    with running(tmp_path / "redis", every_redis.binary, unixsocket=str(path)):
        serves(f"redis+socket://{path}")


def test_a_user_with_few_rights(every_redis: OwnRedis) -> None:
    with Redis.from_url(every_redis.url) as client:
        client.flushall()
        client.execute_command(
            *["ACL", "SETUSER", "celery", "on", ">secret"],
            *["~q*", "~_kombu*", "~unacked*", "~batchery:*", "&*", *RIGHTS.split()],
        )
        serves(every_redis.url.replace("redis://", "redis://celery:secret@"))
        client.execute_command("ACL", "SETUSER", "celery", "-info")
        serves(every_redis.url.replace("redis://", "redis://celery:secret@"))
        client.execute_command("ACL", "DELUSER", "celery")
