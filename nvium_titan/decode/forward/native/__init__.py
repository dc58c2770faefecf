"""Kernels in C for decoding on the CPU; see `kernels.c`."""
