"""Transcription, measured: recordings of many lengths, one by one, in fixed batches, in slots."""
