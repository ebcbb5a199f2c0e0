"""Which models make room for another one."""

import pytest

from batchery_worker.batching.residency import HeldModel, choose_victims


def held(name: str, idle_s: float, reload_s: float = 1.0, size: int = 10) -> HeldModel:
    return HeldModel(name, size, reload_s, idle_s)


@pytest.mark.parametrize(
    ("models", "wanted_bytes", "victims"),
    [
        ([], 1, None),
        ([held("a", 5), held("b", 9)], 0, []),
        ([held("a", 5), held("b", 9)], 10, ["b"]),
        ([held("a", 5), held("b", 9)], 11, ["b", "a"]),
        ([held("a", 5), held("b", 9)], 21, None),
        # It takes ten times as long to have it again.
        ([held("a", 5), held("b", 9, reload_s=10)], 10, ["a"]),
        # The one that is used least is too small, and then need not go.
        ([held("a", 9, size=1), held("b", 5, size=50)], 20, ["b"]),
        ([held("a", 9, size=5), held("b", 5, size=16)], 20, ["a", "b"]),
        # Jobs wait for it.
        ([held("a", 5), held("b", 9)._replace(is_wanted=True)], 10, ["a"]),
        # Nothing is divided by 0.
        ([held("a", 5, reload_s=0), held("b", 4, reload_s=0)], 10, ["a"]),
    ],
)
def test_who_makes_room(
    models: list[HeldModel], wanted_bytes: int, victims: list[str] | None
) -> None:
    assert choose_victims(models, wanted_bytes) == victims
