"""A batch task and an ordinary one, which do the same."""

import os
from typing import Any

from apps.django_books.celery import app
from apps.django_books.models import Book
from batchery import BatchTask


@app.task(base=BatchTask, max_batch_size=64)
def shout(ids: list[int]) -> list[dict[str, Any]]:
    books = Book.objects.in_bulk(ids)
    return [{**_shout(books[each]), "batch": len(ids)} for each in ids]


@app.task
def shout_alone(book_id: int) -> dict[str, Any]:
    return _shout(Book.objects.get(pk=book_id))


def _shout(book: Book) -> dict[str, Any]:
    book.title = book.title.upper()
    book.save()
    return {"title": book.title, "pid": os.getpid()}
