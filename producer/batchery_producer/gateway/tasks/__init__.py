"""Tasks of the allow list: their calls, their records, their results and webhooks."""
