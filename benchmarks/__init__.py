"""What is measured, and how a whole system is tormented: `make bench`.

Not installed with the package; `python -m benchmarks.queue` in a clone of the repository.
"""
