"""The worker's batcher in any process: no broker, no Celery, one thread."""
