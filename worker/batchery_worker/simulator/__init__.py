"""The scheduler in virtual time, beside a fixed batcher. No Redis, no Celery, no torch."""
