"""The models that requests ask for, and what the gateway knows of them without a worker."""
