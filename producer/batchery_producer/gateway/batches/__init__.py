"""OpenAI's files and batches: kept in a store, run in a process beside the gateway.

`storage.py` is a folder or a URL, `store.py` the files and batches in it. Everything that a kill
may not lose is there. `service.py` is what the routes ask. `process.py` is the process that runs
batches, one beside each process of a gateway. Who runs a batch has its lease, in Redis
(`leases.py`). `runner.py` takes one batch from status to status: `validation.py` reads its file, a
run of `batchery submit` sends its requests, and `output.py` keeps what came back, piece by piece,
until the output files are made of it.
"""
