"""OpenAI's files and batches: contents in a store, records in Redis, slices as jobs of the queue.

`files.py` and `store.py` are the files and batches of callers. `run.py` takes a batch from status
to status: `requests.py` reads its file, its requests and their answers.
"""
