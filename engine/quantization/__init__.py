"""Weight formats: how each is laid out in memory, and its reference arithmetic in plain torch."""

from .layouts import COMPANIONS, DENSE, LAYOUTS, companion_rows, dequantize, dequantize_rows, num_cols

__all__ = ["COMPANIONS", "DENSE", "LAYOUTS", "companion_rows", "dequantize", "dequantize_rows", "num_cols"]
