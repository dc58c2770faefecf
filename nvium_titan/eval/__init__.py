"""Evaluation of bundles and of training checkpoints."""
