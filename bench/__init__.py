"""Measurements: every figure is a ratio or a percentile of one run on one machine."""
