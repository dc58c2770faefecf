"""Decoding in graphs on the device at hand: is it exact, what does it launch, hold and cost.

`tools/gpu_check.py` drives it. Four ways to decode are compared: operations one by one (the
reference), a graph per block with a host read at every junction, a graph per token, and the same
with the next token launched before this one is read. On the CPU graphs are imitated: everything but
the times means the same.
"""
