"""Computations with a plain torch reference each."""
