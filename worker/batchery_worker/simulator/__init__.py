"""The scheduler in virtual time, beside rival policies. No Redis, no Celery, no torch."""
