"""OpenAI's files and batches: contents in a store, records in Redis, turns as jobs of the queue.

`files.py` and `store.py` are the files and batches of callers. `turn.py` takes a batch from status
to status: `requests.py` reads its file, sends its requests and takes their answers.
"""
