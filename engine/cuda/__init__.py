"""GPUs through the CUDA driver: which one is meant, and resident segments mapped into this process. No torch."""
