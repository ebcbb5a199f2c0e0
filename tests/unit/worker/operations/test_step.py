"""The port of a worker where its package is missing."""

import sys
from typing import Any

import pytest

from batchery.errors import StartError
from batchery_worker.operations.step import open_port


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "batchery.operations.port", raising=False)
    monkeypatch.delattr("batchery.operations.port", raising=False)
    watch: Any = None
    with pytest.raises(StartError, match=r"pip install 'batchery\[metrics\]'"):
        open_port(watch, "127.0.0.1", 0)
