"""How a batch is run, in any process: stages, lookahead, and the search for a bad item."""
