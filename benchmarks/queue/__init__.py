"""What the queue costs: jobs that do nothing, beside other systems."""
