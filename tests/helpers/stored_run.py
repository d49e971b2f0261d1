"""A run of four steps with checkpoints, made once for all tests that damage a copy of its folder."""

import shutil

import pytest
from launching import train

CONFIG = {
    "training": {"max_steps": 4, "batch_size": 8, "validate_every": 2},
    "checkpoint": {"every": 2, "keep": 5, "background": False},
}


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return train(tmp_path_factory.mktemp("folder"), "local", 1, **CONFIG).run_dir


@pytest.fixture
def run_dir(tmp_path, original):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"
