"""The weight-cache daemon: owns segments, generations and leases. Imports neither torch nor the engine."""
