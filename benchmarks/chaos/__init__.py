"""Torments a whole system, and counts what was lost.

The fault harness, from the pure to the rough: `plan` says how much, `schedule` what goes wrong
when, `workload` what is computed; `verdict` judges what the `ledger` and the `answers` tell. In
between, `outbox` submits, `watcher` reads results, `cluster` holds the processes, and `chaos` runs
it all.
"""
