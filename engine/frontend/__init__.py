"""The OpenAI-compatible server: HTTP, tokenizer, in-flight requests, supervision of cores. No torch."""
