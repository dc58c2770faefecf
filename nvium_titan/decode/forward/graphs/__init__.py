"""Decoding by captured graphs: one launch for a token, and its imitation on the CPU."""
