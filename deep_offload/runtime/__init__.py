"""What happens: lanes, pinned host state, staging slots, measurement."""
