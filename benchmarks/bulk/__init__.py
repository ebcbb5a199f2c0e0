"""Publishing and collecting in bulk, beside Celery's own ways and other queues."""
