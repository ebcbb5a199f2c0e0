"""Its settings: a database on disk for development, and another one for tests."""

import os

SECRET_KEY = "only for tests"
USE_TZ = True
INSTALLED_APPS = ["apps.django_books"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["DJANGO_DATABASE"],
        # None is a database in memory, as Django chooses for SQLite.
        "TEST": {"NAME": os.environ.get("DJANGO_TEST_DATABASE")},
    }
}
CELERY_BROKER_URL = "memory://"
CELERY_RESULT_BACKEND = "cache+memory://"
