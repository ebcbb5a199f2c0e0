"""What tests share: real servers and workers, fakes, and ways to wait."""
