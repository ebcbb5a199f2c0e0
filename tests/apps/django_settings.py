"""A minimal Django project: two names for one database, which keep connections differently."""

import os

SECRET_KEY = "only for tests"
USE_TZ = True
_FILE = {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DJANGO_DATABASE"]}
DATABASES = {
    "default": {**_FILE, "CONN_MAX_AGE": 0},
    "kept": {**_FILE, "CONN_MAX_AGE": None},
}
