"""Segment backends: one module for each kind of memory a generation can live in."""
