"""The port of metrics where its package is missing."""

import sys

import pytest

from batchery.errors import StartError


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "batchery.operations.port", raising=False)
    with pytest.raises(StartError, match=r"pip install 'batchery\[metrics\]'"):
        import batchery.operations.port  # noqa: F401
