"""What worker and device say to each other."""
