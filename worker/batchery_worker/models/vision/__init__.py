"""Models of pictures; some of them know texts, too."""
