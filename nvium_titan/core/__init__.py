"""The mathematics of the mixture: pure functions of tensors, shared by training and decoding."""
