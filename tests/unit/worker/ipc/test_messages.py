"""What parent and device say to each other."""

from datetime import UTC, datetime

import pytest

from batchery.transport.suspects import Deaths
from batchery_worker.ipc.messages import (
    Handed,
    NotReady,
    Ready,
    Reply,
    Setup,
    dump_message,
    dump_reply,
    load_message,
    load_reply,
)


@pytest.mark.parametrize(
    "reply",
    [Ready(pid=7, load_s=0.5), NotReady("not there")],
)
def test_replies_arrive(reply: Reply) -> None:
    assert load_reply(dump_reply(reply)) == reply


def test_messages_to_a_device_arrive() -> None:
    setup = Setup("cpu", ("/lib",), "shop:app", ["shop"], ["embed"], {"": 20})
    raw = {"body": b"\x00", "headers": {"at": datetime(2026, 1, 2, tzinfo=UTC)}}
    handed = Handed("1", raw, Deaths(1), None)
    assert load_message(dump_message(setup)) == setup
    assert load_message(dump_message(handed)) == handed
