from pathlib import Path

import pytest

from preload.daemon.config import DaemonConfig, read_config
from preload.daemon.errors import BadRequestError


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "preload.toml"
    path.write_text(text)
    return str(path)


def test_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[daemon]\nhttp_port = 1\nhost_limit = "1G"\nallow_uids = [7]\nticket_ttl_s = 3\n')
    config = read_config(path, {"http_port": 2}, 1)
    assert (config.http_port, config.host_limit, config.allow_uids, config.ticket_ttl_s) == (2, "1G", (7,), 3)


def test_models_of_the_file_become_sources(tmp_path: Path) -> None:
    path = write(tmp_path, '[[models]]\ncheckpoint = "/m/.//n"\nquantization = "f32"\n')
    (source,) = read_config(path, {}, 5).models
    assert (source.path, source.recipe.quantization, source.recipe.layout_version) == ("/m/n", "f32", 5)


def test_no_file_means_defaults() -> None:
    assert read_config("", {}, 1) == DaemonConfig()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[daemon\n", "preload.toml"),
        ("[other]\n", "'other'"),
        ("[daemon]\nhttp_prot = 1\n", "daemon.http_prot"),
        ('[daemon]\nhttp_port = "x"\n', "daemon.http_port"),
        ("[daemon]\nallow_uids = 3\n", "daemon.allow_uids"),
        ('[[models]]\ncheckpoint = "relative"\n', "models.checkpoint"),
        ('[[models]]\ncheckpoint = "/m/../n"\n', "models.checkpoint"),
        ('[[models]]\ncheckpoint = "/m"\nquantisation = "keep"\n', "models.quantisation"),
    ],
)
def test_wrong_file_is_refused_naming_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadRequestError, match=r"preload\.toml") as refusal:
        read_config(write(tmp_path, text), {}, 1)
    assert named in refusal.value.message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="No such file"):
        read_config(str(tmp_path / "none.toml"), {}, 1)
