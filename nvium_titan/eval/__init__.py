"""Evaluation of exported models and of training checkpoints."""
