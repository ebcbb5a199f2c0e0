"""What the scripts of webhooks do, on every redis-server that there is."""

from pathlib import Path
from typing import Any

from batchery.redis_scripts import RedisScripts
from batchery_producer.gateway.tasks import webhooks
from support.harness import wait_for

FOLDER = Path(webhooks.__file__).parent / "lua"


def claim(bare: Any, lease_s: float, count: int = 10) -> list[bytes]:
    taken: list[bytes] = RedisScripts(bare, FOLDER).run("claim_due", ["due"], lease_s, count)
    return taken


def postpone(bare: Any, seconds: float, *members: str) -> None:
    RedisScripts(bare, FOLDER).run("postpone", ["due"], seconds, *members)


def test_one_gateway_alone_takes_what_is_due_until_its_lease_ends(bare: Any) -> None:
    postpone(bare, 0, "a", "b", "c")
    postpone(bare, 60, "later")
    taken = claim(bare, 5, 2)
    assert taken == [b"a", b"b"]
    assert claim(bare, 60) == [b"c"]
    assert wait_for(lambda: claim(bare, 60), "the leases end") == [b"a", b"b"]
    assert claim(bare, 60) == []


def test_lease_that_is_renewed_does_not_end(bare: Any) -> None:
    postpone(bare, 0, "a")
    assert claim(bare, 0.1) == [b"a"]
    postpone(bare, 60, "a")
    postpone(bare, 0.3, "b")
    assert wait_for(lambda: claim(bare, 60), "the other one is due") == [b"b"]
