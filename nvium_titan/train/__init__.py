"""Training on torchtitan: the model, its loss, the trainer and their settings.

Nothing else imports torchtitan. `trainer` holds the training step, `loss` and `objective` what it
minimises, `model` the layers and junctions, `launch` the entry point.
"""
