"""Serving, measured: this project's server and others' by the same requests of the same client."""
