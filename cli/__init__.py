"""The `preload` command: one file per subcommand, no torch."""
