"""Results that need not be computed: equal items of a batch, and of earlier ones."""
