"""The result cache: equal items are computed once, within a batch and across batches."""
