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
        ("[daemon]\nhttp_prot = 1\n", "known are runtime_dir, host_limit"),
        ('[[models]]\npath = "/m"\n', "known are checkpoint, model, quantization"),
        ("max_loaders = 1\n", "max_loaders belongs under a line [daemon]"),
        ('checkpoint = "/m"\n', "checkpoint belongs under a line [[models]]"),
        ('models = ["/m"]\n', "any number of [[models]]"),
        ('[models]\ncheckpoint = "/m"\n', "any number of [[models]]"),
        ("[daemon]\nmax_loaders = -3\n", "daemon.max_loaders must be between 1 and 1024, not -3"),
        ("[daemon]\ndrain_timeout_s = nan\n", "daemon.drain_timeout_s"),
        (f"[daemon]\nhttp_port = {10**400}\n", "daemon.http_port"),
    ],
)
def test_wrong_file_is_refused_naming_file_and_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(BadRequestError, match=r"preload\.toml") as refusal:
        read_config(write(tmp_path, text), {}, 1)
    assert named in refusal.value.message


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="No such file"):
        read_config(str(tmp_path / "none.toml"), {}, 1)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_loaders", 0, "between 1 and 1024, not 0"),
        ("loader_threads", -1, "between 0 and 1024, not -1"),
        ("http_port", 99999, "between 0 and 65535, not 99999"),
        ("http_port", -1, "between 0 and 65535, not -1"),
        ("http_host", "", "empty"),
        ("runtime_dir", "", "empty"),
        ("host_limit", "500%", "a share lies between 0 and 100 %"),
        ("host_limit", "1e999G", "neither a share"),
        ("host_limit", "0", "a size is positive"),
        ("ticket_ttl_s", -0.5, "not -0.5"),
        ("drain_timeout_s", -1.0, "not -1.0"),
        ("reclaim_timeout_s", float("inf"), "not inf"),
        ("reclaim_timeout_s", float("nan"), "not nan"),
        ("allow_uids", (1000, -1), "-1 is no id"),
        ("allow_gids", (1 << 32,), "4294967296 is no id"),
    ],
)
def test_impossible_value_is_refused_naming_its_field(field: str, value: object, said: str) -> None:
    with pytest.raises(BadRequestError) as refusal:
        read_config("", {field: value}, 1)
    assert refusal.value.message.startswith(field)
    assert said in refusal.value.message


def test_limit_beyond_the_host_is_allowed_with_a_warning() -> None:
    assert DaemonConfig(host_limit="100%").warnings() == []
    (warning,) = DaemonConfig(host_limit="900T").warnings()
    assert "host_limit 900T" in warning
