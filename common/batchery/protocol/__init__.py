"""What batchery adds to Celery's messages and results."""
