"""Model families: a `ModelSpec` and a weight-name map each."""
