"""The same no-op job on several systems; each module is the worker, the producer and the caller.

Each runs in an environment of its own. The address of Redis comes in PEER_URL.
"""
