"""The engine: client, loader, models, core and frontend. Meets the daemon only at `preload.protos`."""
