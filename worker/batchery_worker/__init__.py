"""The worker's side of Batchery: pool, scheduler, device processes, models.

Nothing here is imported by applications: Celery loads it by path when a worker starts.
"""

__all__: list[str] = []
