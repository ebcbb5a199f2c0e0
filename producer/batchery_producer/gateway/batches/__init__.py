"""OpenAI's files and batches: contents in a store, records in Redis, turns as jobs of the queue.

`storage.py` is a folder or a URL; `files.py` and `store.py` are the files and batches of callers.
`service.py` is what the routes ask. `turn.py` takes a batch from status to status: `validation.py`
reads its file, `slices.py` sends its requests and takes their answers, `lines.py` is what a request
and its answer look like.
"""
