"""What a worker tells of itself: metrics, whether it is ready, and whether it is live."""
