"""OpenAI's files and batches: contents in a store, records in Redis, lines as requests of routes.

`files.py` and `store.py` are the files and batches of callers. `requests.py` reads the lines of a
batch's file, and writes their answers. Beside this folder, `batch_run.py` takes a batch from status
to status.
"""
