"""Its Celery app."""

from celery import Celery

from batchery import install

app = install(Celery("books"))
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
