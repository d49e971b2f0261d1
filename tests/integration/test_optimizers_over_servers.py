"""Which optimizers several servers may share, and that one that would be wrong there is refused."""

import functools
import inspect
import textwrap

import pytest
import torch
from launching import TASKS, launch
from torch import nn
from torch.optim import SGD, Adafactor, Adam, AdamW

from paramserver.errors import TaskError
from paramserver.optim import RowWiseAdagrad
from paramserver.optim.parallel_step import ELEMENTWISE, PER_PARAMETER, is_elementwise

LBFGS, SPARSE = torch.optim.LBFGS, torch.optim.SparseAdam  # refused with any number of servers


def made(kind, **options):
    return kind([nn.Parameter(torch.zeros(2, 2))], lr=0.1, **options)


def derived(base, **attributes):
    """A new class, whose ``step`` torch has not wrapped yet."""
    return type("Own", (base,), attributes)


def refuses(optimizer):
    said = r"^optimizer \(\w+\) must look at no two parameters together, .* cluster\.num_servers \(2\), .*"
    with pytest.raises(TaskError, match=said + r"updates_each = .*, or set cluster\.num_servers: 1$"):
        is_elementwise(optimizer, 2)
    return True


def step(self, closure=None):
    """Scales all gradients by their common norm first."""
    parameters = [p for group in self.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 1.0)


def test_every_optimizer_of_torch_has_a_verdict():
    classes = {c for c in vars(torch.optim).values() if isinstance(c, type) and c is not torch.optim.Optimizer}
    assert {*classes, RowWiseAdagrad} == {*ELEMENTWISE, *PER_PARAMETER, LBFGS, SPARSE}
    assert [kind for kind in ELEMENTWISE if not is_elementwise(made(kind), 2)] == []
    assert [kind for kind in PER_PARAMETER if is_elementwise(made(kind), 2)] == []
    assert refuses(made(LBFGS))


@pytest.mark.parametrize("base", [SGD, AdamW, Adafactor])
@pytest.mark.parametrize("first", [True, False])
def test_one_that_is_derived_and_leaves_the_step_alone_gets_whole_parameters(base, first):
    own = derived(base, more=3)
    if first:
        assert not is_elementwise(made(own), 2)  # torch wraps the step that it inherits, in the class itself
    made(base)
    assert not is_elementwise(made(own), 2)
    assert not is_elementwise(made(derived(own)), 2)


@pytest.mark.parametrize("base", [SGD, Adam, AdamW, Adafactor, torch.optim.Optimizer])
def test_one_with_a_step_of_its_own_is_refused_unless_it_says_what_it_does(base):
    def like(**attributes):
        own = derived(base, step=step, **attributes)
        if base is not torch.optim.Optimizer:
            return made(own)
        return own([nn.Parameter(torch.zeros(2))], {"lr": 0.1})

    assert refuses(like())
    assert refuses(like(updates_each="tensor"))
    assert is_elementwise(like(updates_each="element"), 2)
    assert not is_elementwise(like(updates_each="parameter"), 2)


def test_a_word_holds_for_the_step_that_it_was_said_of():
    spoken = derived(SGD, updates_each="element", step=step)
    assert is_elementwise(made(derived(spoken)), 2)
    assert refuses(made(derived(spoken, step=SGD.step)))
    assert is_elementwise(made(derived(derived(spoken, step=step), updates_each="element")), 2)
    assert is_elementwise(made(derived(SGD, updates_each="element")), 2)


def test_a_step_that_is_dressed_as_the_one_it_calls_is_one_of_its_own():
    made(SGD)
    own = functools.wraps(SGD.step)(lambda self, closure=None: SGD.step(self, closure))
    assert refuses(made(derived(SGD, step=own)))


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize("base", [SGD, Adafactor])
def test_hooks_of_a_step_may_look_at_anything(register, base):
    optimizer, spoken = made(base), made(derived(base, updates_each="parameter"))
    for one in (optimizer, spoken):
        getattr(one, register)(lambda *_: None)
    assert refuses(optimizer)
    assert not is_elementwise(spoken, 2)


@pytest.mark.processes
def test_one_that_couples_parameters_is_refused_before_a_step(tmp_path):
    file = tmp_path / "coupled.py"
    file.write_text(
        f"import sys\nsys.path.insert(0, {str(TASKS.parent)!r})\n"
        "from tasks import ReferenceTask\nfrom torch import nn\nfrom torch.optim import SGD\n\n\n"
        f"class Own(SGD):\n{textwrap.indent(inspect.getsource(step), '    ')}\n\n"
        "class Coupled(ReferenceTask):\n    def build_optimizer(self, model):\n"
        "        return Own(model.parameters(), lr=0.1)\n"
    )
    cluster = {"num_trainers": 1, "num_servers": 2, "timeout_s": 30}
    run = launch(tmp_path, mode="rpc", task=f"{file}:Coupled", cluster=cluster)
    assert run.code == 2, run.output
    assert run.output.splitlines()[-1].startswith("error: rank 0 (server 0): optimizer (Own) must look at no two")
    assert "Traceback" not in run.output
    alone = launch(
        tmp_path / "alone", "--set", "cluster.num_servers=1", mode="rpc", task=f"{file}:Coupled", cluster=cluster
    )
    assert alone.code == 0, alone.output
