"""A small Django project, as Celery's own guide lays one out."""
