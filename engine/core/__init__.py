"""The engine core: scheduler, paged KV cache, runner, sampler and the process around them."""
