"""What Prometheus and probes read of workers and of the whole cluster."""
