"""The public names: a literal list. Every exported name can be imported."""

from importlib import import_module

import pytest
from source_tree import modules

PUBLIC = {
    "paramserver": [
        "Callback",
        "ParameterServer",
        "Partition",
        "Result",
        "Subscriber",
        "Task",
        "TrainingError",
        "UnsupportedConfiguration",
        "__version__",
        "rank_zero_only",
        "run",
    ],
    "paramserver.trainers": ["DdpTrainer", "LocalTrainer", "RpcTrainer", "ServedTrainer", "Trainer"],
    "paramserver.buffers": ["Batch", "Buffer", "BufferInfo", "Fifo", "Firo", "Reservoir", "make_buffer"],
    "paramserver.optim": ["RowWiseAdagrad"],
    "paramserver.sources": [
        "DatasetSource",
        "Feeder",
        "IterableSource",
        "Partition",
        "PartitionOrder",
        "ResumePosition",
        "Simulations",
        "Source",
        "Stream",
        "deal",
        "make_source",
    ],
}
FOLDERS = [module.name for module in modules() if module.is_init]


def test_the_public_names_are_these():
    assert {name: import_module(name).__all__ for name in PUBLIC} == PUBLIC


def test_every_exported_name_can_be_imported_and_no_other():
    for module in map(import_module, FOLDERS):
        exported = getattr(module, "__all__", ())
        assert [name for name in exported if getattr(module, name) is None] == [], module.__name__
        assert len(set(exported)) == len(exported), module.__name__
        with pytest.raises(AttributeError, match=f"'{module.__name__}' has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018


def test_exported_names_are_the_objects_of_their_modules():
    import paramserver
    import paramserver.errors
    import paramserver.launch

    assert paramserver.run is paramserver.api.run
    assert paramserver.TrainingError is paramserver.errors.TrainingError


def test_every_error_takes_one_string_and_has_an_exit_code():
    import paramserver.errors as errors

    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert len(classes) >= 20
    for error_class in classes:
        error = error_class("what happened")
        assert str(error) == "what happened"
        assert isinstance(error, errors.ParamserverError)
        assert error.exit_code == {"Interrupted": 3}.get(
            error_class.__name__, 2 if issubclass(error_class, errors.UnsupportedConfiguration) else 1
        )
