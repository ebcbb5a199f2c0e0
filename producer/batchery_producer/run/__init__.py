"""One run of `batchery submit`: read, send, collect, write, resume."""
