"""Benchmarks of decoding and training: N-vium, dense and other engines, in turns."""
