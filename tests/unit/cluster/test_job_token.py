"""The job token: where it is read, what is refused, and where it is not shown."""

import os

import pytest

from paramserver.cluster import ProcessIdentity, RankFlags, resolve_identity
from paramserver.cluster.network import (
    TOKEN_VARIABLE,
    JobToken,
    child_environment,
    hide_token,
    producer_environment,
    read_token,
)
from paramserver.config import ClusterConfig, Config
from paramserver.errors import UnsupportedConfiguration

SECRET = "b1946ac92492d2347c6235b4d2611184"


def write(file, content=SECRET, mode=0o600):
    file.touch(mode=0o600)
    file.write_text(content)
    file.chmod(mode)
    return str(file)


def refused(token_file, environ=()):
    with pytest.raises(UnsupportedConfiguration) as error:
        read_token(token_file, dict(environ))
    assert SECRET not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_and_a_variable_give_the_same_token(tmp_path, mode):
    file = write(tmp_path / "token", f"  {SECRET}\n", mode)
    from_file, from_variable = read_token(file, {}), read_token(None, {TOKEN_VARIABLE: f"{SECRET}\n"})
    assert from_file.secret == from_variable.secret == SECRET.encode()
    assert (from_file.source, from_variable.source) == (f"cluster.token_file ({file})", "PARAMSERVER_TOKEN")


def test_the_variable_comes_before_the_file(tmp_path):
    token = read_token(write(tmp_path / "token"), {TOKEN_VARIABLE: "another one, for this process"})
    assert token.source == TOKEN_VARIABLE
    assert token.secret == b"another one, for this process"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_open_is_refused(tmp_path, mode):
    file = write(tmp_path / "token", mode=mode)
    assert refused(file) == (
        f"cluster.token_file ({file}) must be closed to other users (mode 600, without {mode & 0o077:03o}); "
        f"run: chmod 600 {file}"
    )


def test_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    file, uid = write(tmp_path / "token"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert f"must belong to the user of this process (uid {uid + 1}, not {uid})" in refused(file)


def test_a_file_that_is_none_is_refused(tmp_path):
    assert "cannot be read (No such file or directory); make one with: (umask 077; openssl" in refused(
        str(tmp_path / "missing")
    )
    assert "cannot be read (Is a directory)" in refused(str(tmp_path))
    os.mkfifo(tmp_path / "pipe", 0o600)  # no process writes into it: opening must not wait
    assert "must be a regular file" in refused(str(tmp_path / "pipe"))


@pytest.mark.parametrize("content", ["", " \n", SECRET[:15], SECRET * 200])
def test_a_token_of_a_wrong_length_is_refused(tmp_path, content):
    file = write(tmp_path / "token", content)
    rule = "must hold a token of 16 to 4096 bytes; make one with"
    assert f"cluster.token_file ({file}) {rule}" in refused(file)
    assert f"PARAMSERVER_TOKEN {rule}" in refused(file, {TOKEN_VARIABLE: content}.items())


def test_signatures_depend_on_token_purpose_and_data():
    tokens = (JobToken("a", b"1" * 16), JobToken("a", b"2" * 16))
    made = {token.sign(purpose, data) for token in tokens for purpose in ("joins", "admits") for data in (b"x", b"y")}
    assert len(made) == 8
    assert {len(signature) for signature in made} == {32}


def test_an_identity_has_the_token_and_does_not_show_it():
    environ = {TOKEN_VARIABLE: SECRET}
    identity = resolve_identity(RankFlags(1, 2), environ, Config(mode="ddp"))
    assert identity.token.secret == SECRET.encode()
    assert SECRET not in f"{identity!r} {identity} {identity.token}"
    assert resolve_identity(RankFlags(1, 2), {}, Config(mode="ddp")).token is None


def test_a_wrong_file_is_refused_before_any_rank_starts(tmp_path):
    config = Config(mode="ddp", cluster=ClusterConfig(token_file=str(tmp_path / "missing")))
    with pytest.raises(UnsupportedConfiguration, match="cannot be read"):
        resolve_identity(RankFlags(), {}, config)


def torchrun(**more):
    names = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    where = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job7"}
    return {**names, **where, TOKEN_VARIABLE: SECRET, **more}


def test_a_store_that_torchrun_serves_and_a_token_are_refused_together():
    hosted = torchrun(TORCHELASTIC_USE_AGENT_STORE="True")
    with pytest.raises(UnsupportedConfiguration) as error:
        resolve_identity(RankFlags(), hosted, Config(mode="ddp"))
    assert str(error.value) == (
        "PARAMSERVER_TOKEN cannot be proved at the store that torchrun serves; give --master_port, so that rank 0 "
        "serves the store itself, or leave the token out"
    )
    moved: ProcessIdentity = resolve_identity(RankFlags(master_port=2222), hosted, Config(mode="ddp"))
    assert moved.token is not None
    assert resolve_identity(RankFlags(), torchrun(), Config(mode="ddp")).token is not None


def test_ranks_inherit_the_variable_and_other_processes_do_not():
    environ = {TOKEN_VARIABLE: SECRET, "HOME": "/root"}
    rank = child_environment(environ, num_trainers=1)
    assert rank[TOKEN_VARIABLE] == SECRET
    assert TOKEN_VARIABLE not in producer_environment(rank, {})
    hide_token(rank)
    assert TOKEN_VARIABLE not in rank
    hide_token(rank)  # without effect
