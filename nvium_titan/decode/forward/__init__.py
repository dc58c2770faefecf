"""What computes: one protocol, and its three forwards (torch, CUDA graphs, native kernels)."""
