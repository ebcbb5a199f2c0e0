"""Several processes that feed one card: each takes jobs, tokenizes, and stores results.

The process of the card computes and does nothing else. Rows of tokens and vectors go through memory
that both share; `memory.py` has it, and what is said about it.
"""
