"""Which leases a process holds, and who counts them."""

from batchery.transport.leases import Deaths, Leases, split_value


class Owner:
    """The prefetch of a channel."""

    def __init__(self) -> None:
        self.adopted: list[str] = []
        self.forgotten: list[str] = []

    def adopt(self, token: str) -> None:
        self.adopted.append(token)

    def forget(self, token: str) -> None:
        self.forgotten.append(token)


def take(leases: Leases, owner: Owner, *tokens: str, key: str = "q") -> None:
    for token in tokens:
        leases.take(token, owner, key)


def test_the_highest_token_is_known_although_its_lease_has_ended() -> None:
    leases, owner = Leases(), Owner()
    take(leases, owner, "9", "10", "3")
    leases.forget("10")
    assert leases.last_token == 10
    assert list(leases) == ["9", "3"]
    assert len(leases) == 2
    assert "10" not in leases
    assert "9" in leases


def test_who_counts_a_message_hears_once_that_its_lease_has_ended() -> None:
    leases, owner = Leases(), Owner()
    take(leases, owner, "1", "2")
    assert leases.forget("1") is not None
    assert leases.forget("1") is None
    assert owner.forgotten == ["1"]


def test_a_lease_that_no_channel_counts_can_end() -> None:
    leases, owner = Leases(), Owner()
    take(leases, owner, "1", "2")
    leases.disown(["1", "unknown"])
    assert leases.forget("1") is not None
    assert owner.forgotten == []
    assert leases.owned_by(owner) == ["2"]


def test_a_channel_leaves_its_own_leases_and_no_others() -> None:
    leases, one, other = Leases(), Owner(), Owner()
    take(leases, one, "1", "2")
    take(leases, other, "3")
    leases.abandon(one)
    assert leases.owned_by(one) == []
    assert leases.owned_by(other) == ["3"]
    assert len(leases) == 3


def test_leases_are_counted_by_the_key_of_their_queue() -> None:
    leases, owner = Leases(), Owner()
    take(leases, owner, "1", "2", key="a")
    take(leases, owner, "3", key="b")
    assert leases.by_key() == {"a": 2, "b": 1}
    leases.mark_scheduled("2", is_scheduled=True)
    leases.mark_scheduled("3", is_scheduled=True)
    leases.mark_scheduled("unknown", is_scheduled=True)
    # A message is handed over again after its connection broke.
    take(leases, owner, "2", key="a")
    assert (leases.by_key(), leases.by_key(scheduled=True)) == ({"a": 2, "b": 1}, {"b": 1})
    leases.forget("3")
    assert (leases.by_key(), leases.by_key(scheduled=True)) == ({"a": 2}, {})
    leases.clear()
    assert leases.by_key() == {}
    assert owner.forgotten == ["3"]


def test_a_new_channel_counts_what_runs_and_gets_the_rest_again() -> None:
    leases, before, after = Leases(), Owner(), Owner()
    take(leases, before, "2", "10", "11", "12")
    leases.abandon(before)
    # The answer that brought 9 and 100 was lost; the lease of 12 is gone.
    gone, again = leases.adopt({"2", "10", "11", "9", "100"}, after, active={"11"})
    assert gone == ["12"]
    assert again == ["2", "9", "10", "100"]
    assert after.adopted == ["11"]
    assert leases.owned_by(after) == ["2", "10", "11"]


def test_what_a_channel_counts_already_is_not_delivered_to_it_again() -> None:
    leases, owner = Leases(), Owner()
    take(leases, owner, "1", "2", "3")
    leases.disown(["2"])
    # Redis has lost 3 as well: the channel that holds it learns it from the fencing.
    assert leases.adopt({"1", "2"}, owner, active=()) == ([], ["2"])
    assert owner.adopted == []


def test_value_of_a_lease_has_the_key_and_a_message_of_any_bytes() -> None:
    assert split_value(b"queue\x063\0{\0}") == ("queue\x063", b"{\0}")


def test_suspect_was_in_no_group_unless_it_says_so() -> None:
    assert Deaths(1).group_size == 0
