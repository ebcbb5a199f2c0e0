"""Redis, worker and Flower as child processes: for demos, tests and use on one machine."""
