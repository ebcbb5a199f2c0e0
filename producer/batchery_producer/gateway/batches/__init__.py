"""OpenAI's files and batches: contents in a store, records in Redis, lines as requests of routes.

`files.py` and `store.py` are the files and batches of callers. `run.py` takes a batch from status
to status: `requests.py` reads the lines of its file, and writes their answers.
"""
