"""The slow way: Celery's own tracer completes a job, on threads of its device."""
