"""`batchery submit`: a file in, a file of results out."""
