"""Attach to resident weights; usable alone by any engine."""
