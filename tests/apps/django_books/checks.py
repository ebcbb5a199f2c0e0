"""Its tests, as `docs/testing.md` shows them; run by `python -m django test`."""

import os

import pytest
from celery.contrib.testing.worker import start_worker
from django.db import connection
from django.test import TestCase, TransactionTestCase

from apps.django_books.celery import app
from apps.django_books.models import Book
from apps.django_books.tasks import shout, shout_alone
from support.patience import TIMEOUT_S


class ThroughAWorker(TransactionTestCase):  # type: ignore[misc]
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        worker = start_worker(app, perform_ping_check=False, shutdown_timeout=TIMEOUT_S)
        cls.enterClassContext(worker)

    def test_rows_are_those_of_the_test(self) -> None:
        Book.objects.create(pk=1, title="from the test")
        for task in (shout_alone, shout):
            answer = task.delay(1).get(timeout=TIMEOUT_S)
            assert answer["title"] == "FROM THE TEST"
            assert answer["pid"] == os.getpid()
            assert Book.objects.get().title == "FROM THE TEST"
            Book.objects.update(title="from the test")

    def test_jobs_that_wait_share_a_batch(self) -> None:
        Book.objects.bulk_create(Book(pk=pk, title=f"book {pk}") for pk in range(20))
        answers = shout.submit_many(range(20)).get(timeout=TIMEOUT_S, disable_sync_subtasks=False)
        assert [each["title"] for each in answers] == [f"BOOK {pk}" for pk in range(20)]
        assert max(each["batch"] for each in answers) > 1

    def test_what_a_function_raises_is_its_callers(self) -> None:
        with pytest.raises(KeyError):
            shout.delay(404).get(timeout=TIMEOUT_S)


class InATransaction(TestCase):  # type: ignore[misc]
    def test_an_eager_call_sees_what_is_not_committed(self) -> None:
        assert connection.in_atomic_block
        Book.objects.create(pk=1, title="not committed")
        assert shout.apply((1,)).get()["title"] == "NOT COMMITTED"
        assert shout(1)["title"] == "NOT COMMITTED"
