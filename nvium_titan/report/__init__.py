"""Records of runs, evaluations and benchmarks, and figures of them. No torch."""
