"""Takes jobs to the devices and their outcomes back."""
