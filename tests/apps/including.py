"""An app whose tasks are in a module that it names, and does not import."""

from celery import Celery

from batchery import install

app = install(Celery("including", include=["apps.included"], set_as_current=False))
