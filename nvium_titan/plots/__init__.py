"""Results to figures. Needs the extra `plots` (matplotlib), never torch."""

from nvium_titan.plots.training import plot_exit_shares, plot_loss_curves

__all__ = ["plot_exit_shares", "plot_loss_curves"]
