"""`preload install-units`: what it writes where. Whether systemd likes it is tests/restart/test_systemd.py's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from preload.systemd.units import UnitError, quoted_command, write_units

UNITS = {
    "preload.service",
    "preload-holder@.service",
    "preload-template.service",
    "preload-engine@.service",
    "preload-engine@.socket",
}
DROP_IN = "etc/systemd/system/preload.service.d/descriptor-store.conf"


def install(prefix: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "preload.cli.main", "install-units", "--prefix", str(prefix), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_file_is_written_for_this_installation(tmp_path: Path) -> None:
    done = install(tmp_path, "--user", "weights")
    assert (done.returncode, done.stderr) == (0, "")
    folder = tmp_path / "etc/systemd/system"
    assert {path.name for path in folder.iterdir() if path.is_file()} == UNITS
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert f"wrote {path}" in done.stdout
            assert not re.search("@[A-Z]+@", path.read_text()), path
            assert path.stat().st_mode & 0o777 == 0o644
    text = (folder / "preload.service").read_text()
    assert f"ExecStart={Path(sys.executable).with_name('preload')} daemon --runtime-dir /run/preload" in text
    assert "User=weights\n" in text
    assert 'u weights - "Preload"' in (tmp_path / "etc/sysusers.d/preload.conf").read_text()
    assert "systemctl enable --now preload.service" in done.stdout


def test_configuration_stays_and_units_are_renewed(tmp_path: Path) -> None:
    install(tmp_path)
    config = tmp_path / "etc/preload/daemon.toml"
    unit = tmp_path / "etc/systemd/system/preload.service"
    config.write_text("# mine\n")
    unit.write_text("# old\n")
    assert f"kept  {config}" in install(tmp_path).stdout
    assert config.read_text() == "# mine\n"
    assert "ExecStart=" in unit.read_text()


def test_an_installed_configuration_is_one_the_daemon_reads(tmp_path: Path) -> None:
    from preload.daemon.config import read_config

    install(tmp_path)
    assert read_config(str(tmp_path / "etc/preload/daemon.toml"), {}, 1).models == ()


def test_the_preserving_drop_in_is_for_a_systemd_that_knows_it(tmp_path: Path) -> None:
    write_units(tmp_path, "/usr/bin/preload", "preload", 254)
    assert "FileDescriptorStorePreserve=yes" in (tmp_path / DROP_IN).read_text()
    write_units(tmp_path, "/usr/bin/preload", "preload", 252)
    assert not (tmp_path / DROP_IN).exists()
    for path in tmp_path.rglob("*.service"):
        assert "\nFileDescriptorStorePreserve" not in path.read_text()


@pytest.mark.parametrize("user", ["", "Not A User", "a/b", "-x", "x\ny"])
def test_a_name_that_is_no_user_is_refused(tmp_path: Path, user: str) -> None:
    with pytest.raises(UnitError, match="no name for a system user"):
        write_units(tmp_path, "/usr/bin/preload", user, 252)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["/opt/preload/bin/preload"], "/opt/preload/bin/preload"),
        (["/opt/my models/bin/python", "-m", "x"], '"/opt/my models/bin/python" -m x'),
        (["/opt/100%/$HOME/preload"], "/opt/100%%/$$HOME/preload"),
    ],
)
def test_a_command_is_quoted_as_systemd_reads_it(words: list[str], text: str) -> None:
    assert quoted_command(words) == text


@pytest.mark.parametrize("word", ['/opt/"x"', "/opt/a\\b", "/opt/a\nb"])
def test_a_path_that_systemd_cannot_start_is_refused(word: str) -> None:
    with pytest.raises(UnitError, match="cannot start"):
        quoted_command([word])


def test_a_folder_that_cannot_be_written_is_an_error_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("a file")
    done = install(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("preload install-units: ")
    assert "Traceback" not in done.stderr
