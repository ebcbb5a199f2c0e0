"""`apps.shop` as docs/celery.md advises for green threads: they share one result backend."""

from apps.shop import app

app.conf.result_backend_thread_safe = True
