"""From a folder or a hub id to weights, tokenizer, limits and pooling."""
