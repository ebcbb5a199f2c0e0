"""Redis, worker and gateway as child processes: for demos, tests and use on one machine."""
