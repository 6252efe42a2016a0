"""Number formats of resident weights: how each is made and what it means."""
