"""Performance model and simulator of a plan. Standard library only."""
