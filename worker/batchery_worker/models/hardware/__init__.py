"""What a model runs on: memory, threads, number formats, copies between host and device."""
