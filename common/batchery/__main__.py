"""`python -m batchery` is the `batchery` command."""

from batchery.cli.main import main

if __name__ == "__main__":
    main(prog_name="batchery")
