"""Measuring decode speed, honestly: N-vium, its dense model and other engines, interleaved."""
