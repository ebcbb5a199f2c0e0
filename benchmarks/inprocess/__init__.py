"""In-process batchers, side by side."""
