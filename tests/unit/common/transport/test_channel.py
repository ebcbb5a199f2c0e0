"""The states of a leasing channel: it fetches, waits for a change, or has no room."""

from typing import Any

import pytest
import redis

from batchery.transport.consume import Fenced
from batchery.transport.inbox import Capacity
from batchery.transport.leases import HeldJob
from support.fake_channel import Channel, Connection, Workload

#: Answer to a fetch: how many were suspects, first token, number of its list, message.
MESSAGES = [0, 7, 0, b"{}"]


# Fetching


def test_channel_that_does_not_lease_is_kombu_s() -> None:
    channel = Channel()
    channel.turn()
    assert channel.read()
    channel.sweep()
    channel.ask_again()
    assert channel.stock == ["start", "read"]
    assert not channel.others_wait()
    assert channel.give_to_waiting([HeldJob("1", True)]) == set()
    channel.close()
    assert channel.closed


def test_pop_of_kombu_s_that_is_under_way_is_read_by_kombu(channel: Channel) -> None:
    channel._in_poll = channel.redis
    assert channel.read()
    assert channel.stock == ["read"]
    assert channel.fetcher.asked == []


def test_messages_are_handed_over_and_more_are_asked_for(channel: Channel) -> None:
    channel.turn()
    assert channel.state == "fetches"
    assert channel._brpop_sent_at is not None
    channel.fetcher.answer = MESSAGES
    assert channel.read()
    assert channel.inbox.taken == [MESSAGES]
    assert channel.state == "asks next"
    channel.turn()
    assert channel.fetcher.asked == [False, False]


def test_pool_is_told_when_messages_are_handed_over(channel: Channel) -> None:
    channel.workload = Workload()
    channel.turn()
    channel.fetcher.answer = MESSAGES
    assert channel.read()
    assert channel.workload.handed_over == 1
    assert channel.inbox.taken == [MESSAGES]


def test_worker_waits_when_it_has_taken_all(channel: Channel) -> None:
    channel.fetcher.took_all, channel.fetcher.answer = True, MESSAGES
    channel.turn()
    assert channel.read()
    assert channel.state == "waits"
    # Kombu takes a connection for dead that owes an answer for too long.
    assert channel._brpop_sent_at is None


def test_fetch_that_finds_nothing_although_a_key_is_there_is_tried_once_more(
    channel: Channel,
) -> None:
    states = []
    for _ in range(2):
        channel.turn()
        assert not channel.read()
        states.append(channel.state)
    # The key is no list, or the messages are too large: the sweep looks again.
    assert states == ["asks next", "waits"]


def test_fetch_that_does_not_watch_says_nothing_about_a_key(channel: Channel) -> None:
    channel.fetcher.watches = False
    for _ in range(3):
        channel.turn()
        assert not channel.read()
        assert channel.state == "asks next"


def test_messages_in_between_make_the_next_empty_answer_the_first_again(channel: Channel) -> None:
    states = []
    for answer in ([], MESSAGES, [], []):
        channel.fetcher.answer = answer
        channel.turn()
        channel.read()
        states.append(channel.state)
    assert states == ["asks next", "asks next", "asks next", "waits"]


def test_change_is_answered_by_a_fetch_at_once(channel: Channel) -> None:
    channel.wait()
    channel.fetcher.answer, channel.fetcher.took_all = MESSAGES, False
    assert channel.read()
    assert channel.fetcher.asked == [True]
    assert channel.inbox.taken == [MESSAGES]
    assert channel.redis.pushes_read == 0
    assert channel.state == "asks next"


def test_fetch_notes_nothing_while_batches_run(channel: Channel) -> None:
    channel.wait().lease_store.running_batches.are_some = True
    channel.read()
    assert channel.fetcher.asked == [False]


def test_change_is_read_and_left_where_there_is_no_room(channel: Channel) -> None:
    channel.wait().fetcher.has_room = False
    assert not channel.read()
    assert channel.redis.pushes_read == 1
    assert channel.state == "asks next"
    assert channel.inbox.taken == []


def test_without_room_nothing_is_asked_and_nothing_waited_for(channel: Channel) -> None:
    channel.fetcher.has_room = False
    channel.turn()
    assert channel.state == "asks next"
    channel.read_push()
    assert channel.redis.pushes_read == 1


def test_fresh_connection_is_prepared_and_its_leases_compared_once(channel: Channel) -> None:
    channel.fetcher.answer = MESSAGES
    for _ in range(2):
        channel.turn()
        channel.read()
    assert (channel.fetcher.prepared, channel.inbox.reconciled) == (1, 1)
    channel.redis.disconnect()
    channel.turn()
    assert (channel.fetcher.prepared, channel.inbox.reconciled) == (2, 2)


def test_what_is_not_sure_is_compared_with_redis_before_more_is_taken(channel: Channel) -> None:
    channel.wait().prepare_anew()
    assert channel.state == "asks next"
    channel.turn()
    assert channel.inbox.reconciled == 2


def test_scripts_that_were_flushed_are_loaded_again(channel: Channel) -> None:
    channel.turn()
    channel.fetcher.answer = redis.exceptions.NoScriptError("NOSCRIPT")
    assert not channel.read()
    channel.turn()
    assert channel.fetcher.prepared == 2


@pytest.mark.parametrize("error", [redis.ConnectionError("lost"), redis.ReadOnlyError("READONLY")])
def test_connection_that_broke_or_serves_nobody_is_left(channel: Channel, error: Exception) -> None:
    channel.turn()
    channel.fetcher.answer = error
    with pytest.raises(redis.ConnectionError):
        channel.read()
    assert channel.redis._sock == 2
    assert channel.state == "asks next"
    assert channel.stock == ["reauth"]


def test_worker_without_its_leases_begins_anew(channel: Channel) -> None:
    channel.turn()
    channel.fetcher.answer = None
    assert not channel.read()
    assert channel.lease_store.fenced
    with pytest.raises(Fenced):
        channel.turn()
    assert not channel.lease_store.fenced


def test_lost_connection_ends_a_fetch_or_a_wait_on_it_and_no_other(channel: Channel) -> None:
    channel.turn()
    channel._on_connection_disconnect(Connection())
    assert channel._fetching
    channel._on_connection_disconnect(channel.redis)
    assert not channel._fetching
    channel._in_poll = None
    channel.wait()._on_connection_disconnect(channel.redis)
    assert not channel._waiting


# Looking again


def test_channel_that_waits_asks_again_when_it_is_told_to(channel: Channel) -> None:
    channel.wait().ask_again()
    assert channel.state == "asks next"
    channel.turn()
    channel.ask_again()
    # A fetch that is under way goes on.
    assert channel.state == "fetches"


@pytest.mark.parametrize(
    ("is_empty", "room", "expected"),
    [
        (True, Capacity(), "waits"),
        (False, Capacity(), "asks next"),
        (True, Capacity(1, 0), "asks next"),
    ],
)
def test_sweep_finds_a_change_that_was_missed_and_a_capacity_that_redis_does_not_know(
    channel: Channel, is_empty: bool, room: Capacity, expected: str
) -> None:
    channel.wait().workload = Workload()
    channel.workload.room, channel.fetcher.is_empty = room, is_empty
    channel.sweep()
    assert channel.lease_store.calls == ["flush"]
    assert channel.state == expected


def test_sweep_asks_nothing_on_a_connection_that_is_gone_or_while_a_fetch_is_under_way(
    channel: Channel,
) -> None:
    channel.fetcher.is_empty = False
    channel.sweep()
    channel.turn()
    channel.sweep()
    assert channel.state == "fetches"
    channel.read()
    channel.wait().redis.disconnect()
    channel.fetcher.is_empty = False
    channel.sweep()
    assert channel.state == "waits"


def test_sweep_finds_that_a_worker_has_lost_its_leases(channel: Channel) -> None:
    channel.lease_store.fenced = True
    with pytest.raises(Fenced):
        channel.sweep()


def test_loop_is_woken_once_for_all_leases_that_end_before_it_looks(channel: Channel) -> None:
    for _ in range(3):
        channel.make_room()
    assert channel.connection.wakes == 1
    channel.look_for_room()
    channel.make_room()
    assert channel.connection.wakes == 2
    # A closed channel has no transport.
    channel.look_for_room()
    channel.connection = None
    channel.make_room()


def test_queues_that_had_their_share_are_asked_when_a_lease_has_ended(channel: Channel) -> None:
    channel.wait().look_for_room()
    channel.make_room()
    channel.look_for_room()
    # All queues were asked.
    assert channel.state == "waits"
    channel.fetcher.left_some_out = True
    channel.look_for_room()
    assert channel.state == "waits"
    channel.make_room()
    channel.look_for_room()
    assert channel.state == "asks next"


def test_room_that_is_made_during_a_fetch_is_not_forgotten(channel: Channel) -> None:
    channel.fetcher.left_some_out = channel.fetcher.took_all = True
    channel.turn()
    channel.make_room()
    channel.look_for_room()
    channel.read()
    assert channel.state == "waits"
    channel.look_for_room()
    assert channel.state == "asks next"


# Giving back


def test_jobs_go_back_to_the_first_step_of_their_queue_if_their_leases_are_held(
    channel: Channel,
) -> None:
    owner: Any = None
    channel.lease_store.leases.take("1", owner, "shop-q\x063")
    jobs = [HeldJob("1", True), HeldJob("2", True)]
    assert channel.give_to_waiting(jobs) == {"1"}
    assert channel.lease_store.given == [(HeldJob("1", True), "shop-q")]


def test_fenced_worker_gives_nothing_and_asks_for_nobody(channel: Channel) -> None:
    channel.lease_store.waiting = True
    assert channel.others_wait()
    channel.lease_store.fenced = True
    assert channel.give_to_waiting([HeldJob("1", True)]) == set()
    assert channel.lease_store.given == []
    assert not channel.others_wait()


def test_refused_question_whether_others_wait_is_a_lost_connection(channel: Channel) -> None:
    channel.lease_store.waiting = redis.ReadOnlyError("READONLY")
    with pytest.raises(redis.ConnectionError):
        channel.others_wait()
