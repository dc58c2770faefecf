"""N-vium on torchtitan: the mixture-of-exits transformer, trained to scale and decoded exactly."""

__version__ = "0.1.0"
