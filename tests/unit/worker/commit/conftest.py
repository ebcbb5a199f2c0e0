"""No receiver and no log reads a result, unless a test connects one."""

import logging

import pytest
from celery.app import trace

from batchery_worker.commit.listeners import SIGNALS_AFTER, SIGNALS_BEFORE


@pytest.fixture(autouse=True)
def _no_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apps of other tests have connected receivers in this process."""
    for signal in (*SIGNALS_BEFORE, *SIGNALS_AFTER):
        monkeypatch.setattr(signal, "receivers", [])
    monkeypatch.setattr(trace.logger, "level", logging.WARNING)
