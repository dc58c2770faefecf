"""What several tests share."""

HANG_S = 600
"""After so long a test gives up on a process. A busy machine makes tests slow; only a hang takes
this long."""
