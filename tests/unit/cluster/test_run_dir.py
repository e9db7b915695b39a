"""The run directory: what `up` writes, who holds it, what is forgotten."""

from pathlib import Path

import pytest

from cluster.config import load_config
from cluster.core.errors import ConfigError
from cluster.run_dir import RunDir
from cluster.secret import read_secret


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "clusters" / "test")


def test_programs_read_what_was_prepared(run_dir: RunDir) -> None:
    config = run_dir.prepare(load_config(None, ["pools.decode.replicas=2"]), None)
    assert run_dir.config() == config
    assert config.secret_file == str(run_dir.secret_file)
    assert len(read_secret(run_dir.secret_file)) == 64
    assert run_dir.folder.stat().st_mode & 0o777 == 0o700
    first = read_secret(run_dir.secret_file), read_secret(run_dir.token_file)
    run_dir.prepare(load_config(), None)
    assert (read_secret(run_dir.secret_file), read_secret(run_dir.token_file)) == first


def test_a_given_secret_is_used(run_dir: RunDir, tmp_path: Path) -> None:
    run_dir.prepare(load_config(), None)
    config = run_dir.prepare(load_config(), "from-the-environment")
    assert read_secret(Path(str(config.secret_file))) == "from-the-environment"
    mounted = str(tmp_path / "mounted")
    assert run_dir.prepare(load_config(None, [f"secret_file={mounted}"]), None).secret_file == mounted
    with pytest.raises(ConfigError, match="ASCII"):
        run_dir.prepare(load_config(), "short")


def test_desired_counts_and_ray_of_an_earlier_run_are_forgotten(run_dir: RunDir) -> None:
    assert run_dir.prepare(load_config(), None).router.workers_file == str(run_dir.workers_file)
    run_dir.workers_file.write_text("[]")
    run_dir.leaving_file.touch()
    run_dir.desired_file.write_text("{}")
    run_dir.address_file.write_text("127.0.0.1:1")
    folder = run_dir.ray_folder()
    assert folder.is_dir()
    run_dir.prepare(load_config(), None)
    assert not run_dir.desired_file.exists()
    assert not run_dir.workers_file.exists()
    assert not run_dir.leaving_file.exists()
    assert run_dir.ray_address() is None
    assert not folder.exists()


def test_one_holder_at_a_time(run_dir: RunDir) -> None:
    assert run_dir.holder() is None
    run_dir.prepare(load_config(), None)
    lock = run_dir.hold()
    assert lock is not None
    assert run_dir.hold() is None
    assert run_dir.holder() is not None
    lock.close()
    assert run_dir.holder() is None


def test_nothing_ran_here(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match="no cluster has been started here"):
        run_dir.config()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot write"):
        RunDir(tmp_path / "file" / "test").prepare(load_config(), None)
