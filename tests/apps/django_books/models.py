"""One table."""

from django.db import models


class Book(models.Model):  # type: ignore[misc]
    title = models.TextField()
