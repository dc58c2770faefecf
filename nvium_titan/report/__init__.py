"""Records of runs, evaluations and benchmarks, and the figures drawn from them. Never torch."""
