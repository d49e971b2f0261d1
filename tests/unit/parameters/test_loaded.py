"""Changes of parameters since they were loaded are noticed."""

import pytest
import torch
from torch import nn

from paramserver.errors import TaskError
from paramserver.parameters.loaded import LoadedParameters


def loaded(owned=True):
    model = nn.Linear(3, 2)
    return model, LoadedParameters(dict(model.named_parameters()), owned)


def set_data(tensor):
    tensor.data = tensor.data.clone()


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("change", [lambda p: p.mul_(2), set_data], ids=["in place", "assigned"])
def test_a_visible_change_is_noticed_in_each_step(owned, change):
    model, parameters = loaded(owned)
    for _ in range(10):  # of the tenth no values are noted
        parameters.note()
    parameters.check()
    with torch.no_grad():
        change(model.bias)
    with pytest.raises(TaskError, match="parameter bias was changed by the task"):
        parameters.check()


@pytest.mark.parametrize("noted", [1, 2, 3, 64, 128])
def test_a_change_through_data_is_noticed_where_values_are_compared(noted):
    model, parameters = loaded()
    for _ in range(noted):
        parameters.note()
    model.weight.data[0, 0] += 1
    parameters.check(values=False)  # what a server may have written to is no change
    with pytest.raises(TaskError, match="parameter weight was changed"):
        parameters.check()


@pytest.mark.parametrize("owned", [True, False])
def test_values_that_are_restored_are_a_change_in_memory_of_the_server_only(owned):
    model, parameters = loaded(owned)
    for _ in range(2):
        parameters.note()
    for _ in range(5):
        with torch.no_grad():
            before = model.weight.clone()
            model.weight.add_(1)
            model.weight.copy_(before)
        if not owned:
            with pytest.raises(TaskError, match="parameter weight was changed"):
                parameters.check()
            return
        parameters.check()
        parameters.note()  # from now on with values
    model.weight.data[0, 0] += 1
    with pytest.raises(TaskError, match="parameter weight was changed"):
        parameters.check()


def test_a_trainer_that_reads_memory_of_the_server_tells_its_own_change_from_one_that_may_be_of_another():
    model, parameters = loaded(owned=False)
    parameters.note()
    model.weight.data.mul_(2)  # as seen from this trainer, another process may have done it
    with pytest.raises(TaskError, match=r"parameter weight was changed by the task.*another one may have changed it"):
        parameters.check()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(TaskError, match="parameter weight was changed by the task") as own:
        parameters.check()
    assert "another" not in str(own.value)


def test_nothing_is_a_change_before_the_first_version():
    model, parameters = loaded()
    set_data(model.weight)
    parameters.check()
