"""Building blocks of a decoder over resident weights."""
