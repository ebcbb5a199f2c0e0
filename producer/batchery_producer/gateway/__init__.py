"""The HTTP gateway: a producer that speaks the APIs which clients have.

`server.py` runs it, `app.py` puts it together. A request passes `guard.py` (keys, sizes, how many
at once), then its route in `routes/`, which asks `inference.py` for results. Nothing is kept here
that a kill may lose: jobs are in the queue, files in their store.
"""
