"""`batchery doctor`: facts of a deployment, gathered once, and pure checks of them."""
