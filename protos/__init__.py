"""Generated stubs of the contracts: what the daemon, the engine and the loader say to each other."""
