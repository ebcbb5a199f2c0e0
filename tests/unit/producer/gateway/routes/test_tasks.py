import pytest

from batchery_producer.gateway.routes.tasks import is_allowed


@pytest.mark.parametrize(
    ("name", "entries", "allowed"),
    [
        ("shop.pay", [], False),
        ("shop.pay", ["shop.pay"], True),
        ("shop.pay", ["shop.payments", "shop"], False),
        ("shop.pay", ["shop.*"], True),
        ("shopping.pay", ["shop.*"], False),
        ("shop.pay", ["*"], True),
        ("shop.pay", ["sh*.pay"], False),
    ],
)
def test_allow_list(name: str, entries: list[str], allowed: bool) -> None:
    assert is_allowed(name, entries) is allowed
