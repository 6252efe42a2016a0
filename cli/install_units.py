"""`preload install-units`: write the unit files for systemd, and say what to do next."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_NEXT = """
Next:
  systemd-sysusers && systemd-tmpfiles --create          # the user {user}, its folders
  systemctl daemon-reload
  systemctl enable --now preload.service preload-template.service

An engine, which may read the checkpoint as user {user}:
  echo 'OPTIONS=/models/chat.gguf' > /etc/preload/engines/chat.conf
  systemctl enable --now preload-engine@chat.socket preload-engine@chat.service

After an upgrade of the package: preload install-units && systemctl daemon-reload && systemctl restart preload.service
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefix", default="/", metavar="DIR", help="write below this folder, as for an image (/)")
    parser.add_argument("--user", default="preload", metavar="NAME", help="system user to run as (preload)")


def run(arguments: argparse.Namespace) -> int:
    from preload.systemd.units import PRESERVING_VERSION, UnitError, quoted_command, write_units

    version = systemd_version()
    try:
        command = quoted_command(preload_command())
        written = write_units(Path(arguments.prefix), command, arguments.user, version)
    except (UnitError, OSError) as error:
        print(f"preload install-units: {error}", file=sys.stderr)
        return 2
    for path in written.paths:
        print(f"wrote {path}")
    for path in written.kept:
        print(f"kept  {path}")
    if version < PRESERVING_VERSION:
        known = f"systemd {version}" if version else "no systemd was found here, and one before 254"
        print(f"note: {known} keeps weights over restarts and crashes, but not over `systemctl stop`")
    for folder in closed_folders():
        print(
            f"note: only its owner may enter {folder}, where this installation lies: install it elsewhere for others"
        )
    print(_NEXT.format(user=arguments.user), end="")
    return 0


def preload_command() -> list[str]:
    """The `preload` of this installation: the script beside its interpreter, or the module where there is none."""
    script = Path(sys.executable).with_name("preload")
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "preload.cli.main"]


def closed_folders() -> list[Path]:
    """Folders on the way to this interpreter that the system user will not get into."""
    ways = {*Path(sys.executable).parents, *Path(os.path.realpath(sys.executable)).parents}
    return sorted(folder for folder in ways if not folder.stat().st_mode & 0o001)


def systemd_version() -> int:
    """Of the systemd on this machine; 0 if there is none."""
    import subprocess

    try:
        answer = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    word = answer.stdout.split()[1] if len(answer.stdout.split()) > 1 else ""
    digits = word.split(".")[0].split("~")[0]
    return int(digits) if digits.isdigit() else 0
