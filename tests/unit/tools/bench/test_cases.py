"""Which cases a command line asks for, and in which order they are run."""

import pytest

from paramserver.errors import UnsupportedConfiguration
from paramserver.tools.bench.cases import RequestedCases, interleaved, make_cases, parse_sweep
from paramserver.tools.bench.slowdown import SlowdownSpec


@pytest.fixture
def request_of(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("task: a:B\ntraining: {max_steps: 5}\n")
    return lambda **words: RequestedCases(file, **words)


def names(request_of):
    return [case.name for case in make_cases(request_of)]


def refused(request_of, message):
    with pytest.raises(UnsupportedConfiguration) as caught:
        make_cases(request_of)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_baselines_are_made_without_a_flag(request_of):
    found = make_cases(request_of())
    assert [case.name for case in found] == ["local", "no communication 2 trainers", "ddp 2 trainers", "rpc 2 trainers"]
    assert [case.baseline for case in found] == ["local", "no communication", None, None]
    assert [(case.trainers, case.servers, case.runs) for case in found] == [(1, 0, 1), (2, 0, 2), (2, 0, 1), (2, 1, 1)]
    assert [case.mode.name for case in found] == ["local", "local", "ddp", "rpc"]
    assert all(case.config.cluster.num_trainers == case.trainers for case in found)


def test_a_mode_that_is_a_baseline_already_is_no_case_twice(request_of):
    assert names(request_of(modes="local")) == ["local", "no communication 2 trainers"]
    assert names(request_of(modes="rpc, local,rpc", trainers="1")) == ["local", "rpc 1 trainer"]


def test_each_number_of_trainers_has_its_limit(request_of):
    assert names(request_of(modes="ddp", trainers="1,2,4")) == [
        "local",
        "no communication 2 trainers",
        "no communication 4 trainers",
        "ddp 1 trainer",
        "ddp 2 trainers",
        "ddp 4 trainers",
    ]


def test_a_sweep_makes_cases_where_its_key_means_something(request_of):
    found = make_cases(request_of(sweeps=["server.consistency=sync,async", "training.batch_size=8,16"]))
    assert [case.name for case in found] == [
        "local, batch_size=8",
        "local, batch_size=16",
        "no communication 2 trainers, batch_size=8",
        "no communication 2 trainers, batch_size=16",
        "ddp 2 trainers, batch_size=8",
        "ddp 2 trainers, batch_size=16",
        "rpc 2 trainers, consistency=sync, batch_size=8",
        "rpc 2 trainers, consistency=sync, batch_size=16",
        "rpc 2 trainers, consistency=async, batch_size=8",
        "rpc 2 trainers, consistency=async, batch_size=16",
    ]
    assert found[-1].overrides == {"server.consistency": "async", "training.batch_size": 16}
    assert (found[-1].config.server.consistency, found[-1].config.training.batch_size) == ("async", 16)
    assert [case.config.training.batch_size for case in found[:2]] == [8, 16]


def test_local_steps_are_swept_in_every_mode_and_compression_where_there_are_servers(request_of):
    found = names(request_of(sweeps=["training.local_steps=1,32", "server.compression=none,int8"]))
    assert found[:2] == ["local, local_steps=1", "local, local_steps=32"]
    assert found[4:] == [
        "ddp 2 trainers, local_steps=1",
        "ddp 2 trainers, local_steps=32",
        "rpc 2 trainers, local_steps=1, compression=none",
        "rpc 2 trainers, local_steps=1, compression=int8",
        "rpc 2 trainers, local_steps=32, compression=none",
        "rpc 2 trainers, local_steps=32, compression=int8",
    ]


def test_a_section_that_is_one_value_is_swept(request_of):
    found = make_cases(
        request_of(modes="ddp", sweeps=["training.outer={optimizer: sgd},{optimizer: adam, lr: 0.1},null"])
    )
    outer = [case.config.training.outer for case in found[-3:]]
    assert [one and (one.optimizer, one.lr) for one in outer] == [("sgd", None), ("adam", 0.1), None]
    refused(request_of(sweeps=["checkpoint.best=null"]), "checkpoint.best is decided by the benchmark")
    refused(request_of(sweeps=["training={seed: 1}"]), "training is not a key")


def test_numbers_of_servers_and_options_of_ddp_are_swept_for_their_mode_alone(request_of):
    found = make_cases(request_of(sweeps=["cluster.num_servers=1,2", "ddp.comm_hook=none,fp16"]))
    assert [(case.name, case.servers) for case in found[2:]] == [
        ("ddp 2 trainers, comm_hook=none", 0),
        ("ddp 2 trainers, comm_hook=fp16", 0),
        ("rpc 2 trainers, num_servers=1", 1),
        ("rpc 2 trainers, num_servers=2", 2),
    ]


def test_names_distinguish_keys_that_end_alike(request_of):
    found = names(request_of(modes="rpc", sweeps=["task_args.a.size=1,2", "task_args.b.size=3"]))
    assert found[-2:] == [
        "rpc 2 trainers, task_args.a.size=1, task_args.b.size=3",
        "rpc 2 trainers, task_args.a.size=2, task_args.b.size=3",
    ]
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("k=1,2", ["1", "2"]),
        ("k=[1, 2],[3]", ["[1, 2]", "[3]"]),
        ("k={a: 1, b: 2}, null", ["{a: 1, b: 2}", "null"]),
        ("k='a,b',c", ["'a,b'", "c"]),
        ("k=1, 1,1", ["1"]),
        ("k=a=b,c", ["a=b", "c"]),
    ],
)
def test_values_of_a_sweep_are_yaml(text, values):
    assert parse_sweep(f"task_args.{text}") == ("task_args.k", values)


def test_overrides_hold_for_all_cases_and_sweeps_go_over_them(request_of):
    found = make_cases(request_of(overrides=["training.batch_size=4", "seed=3"], sweeps=["seed=5,6"]))
    assert {case.config.training.batch_size for case in found} == {4}
    assert [case.config.seed for case in found[:2]] == [5, 6]
    assert found[0].overrides == {"seed": 5}


def test_the_number_of_trainers_is_the_configs_where_none_is_given(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("task: a:B\ncluster: {num_trainers: 3}\ntraining: {max_steps: 5}\n")
    assert names(RequestedCases(file, modes="ddp")) == ["local", "no communication 3 trainers", "ddp 3 trainers"]


def test_with_a_slow_trainer_all_but_the_single_process_are_there_without_and_with_it(request_of):
    slow = SlowdownSpec(1, 5.0)
    found = make_cases(request_of(slow=slow, modes="ddp"))
    assert [(case.name, case.slow) for case in found] == [
        ("local", None),
        ("no communication 2 trainers", None),
        ("no communication 2 trainers, trainer 1 slowed 5 times", slow),
        ("ddp 2 trainers", None),
        ("ddp 2 trainers, trainer 1 slowed 5 times", slow),
    ]
    assert str(SlowdownSpec(0, 2.5, 0.1)) == "trainer 0 slowed 2.5 times with probability 0.1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"modes": "ddp,rcp"}, "--modes ddp,rcp: rcp must be one of rpc, ddp, local; did you mean rpc?"),
        ({"modes": "ddp,"}, "--modes ddp,: must be words with commas between"),
        ({"trainers": "2,zero"}, "--trainers 2,zero: zero must be a whole number from 1 on"),
        ({"trainers": "0"}, "--trainers 0: 0 must be a whole number from 1 on"),
        ({"sweeps": ["training.batchsize=1,2"]}, "write training.batch_size"),
        ({"sweeps": ["training.batch_size"]}, "must be key=value,value"),
        ({"sweeps": ["training.batch_size=1,,2"]}, "must be key=value,value"),
        ({"sweeps": ["training.batch_size=1,x"]}, "--sweep training.batch_size=x: training.batch_size (x) must be"),
        ({"sweeps": ["seed=1", "seed=2"]}, "--sweep seed is given twice"),
        ({"sweeps": ["mode=rpc,ddp"]}, "mode is what --modes is for"),
        ({"sweeps": ["cluster.num_trainers=1,2"]}, "cluster.num_trainers is what --trainers is for"),
        ({"overrides": ["training.max_seconds=3"]}, "training.max_seconds is what --seconds is for"),
        ({"overrides": ["checkpoint.best={metric: loss}"]}, "checkpoint.best is decided by the benchmark"),
        ({"sweeps": ["logging.name=a,b"]}, "logging.name is decided by the benchmark"),
        ({"sweeps": ["training.max_steps=1,2"]}, "training.max_steps is decided by the benchmark"),
        ({"overrides": ["server.consistancy=sync"]}, "did you mean server.consistency?"),
        ({"slow": SlowdownSpec(2, 5.0)}, "trainer (2) must be below the number of trainers of every case (2)"),
        ({"slow": SlowdownSpec(1, 5.0), "trainers": "1,2"}, "must be below the number of trainers of every case (1)"),
    ],
)
def test_what_is_wrong_is_reported_in_one_sentence(request_of, words, message):
    refused(request_of(**words), message)


def test_a_value_that_only_one_mode_refuses_is_refused_before_anything_runs(request_of):
    refused(request_of(sweeps=["server.backup_trainers=0,7"]), "backup_trainers")


def test_cases_take_turns_and_their_order_turns_round():
    assert list(interleaved(["a", "b"], 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
    assert list(interleaved([], 2)) == []
