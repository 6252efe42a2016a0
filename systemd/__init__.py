"""Unit files for systemd."""
