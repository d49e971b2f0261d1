"""A device without hardware: tensors of ``torch.device("fakegpu")``, in memory of this process.

It is stricter than the CPU in the points in which a GPU is. An operation on tensors of two devices fails, except copies
and scalars. A copy to the CPU with ``non_blocking=True`` is made only once the stream is synchronized, so that code
which does not wait reads what was there before. It is a Python backend of torch (``PrivateUse1``): each operation runs
the kernel of the CPU, on the same memory, so results are those of the CPU wherever the operations are the same.

``install()`` makes this process take it for the GPUs that ``device.kind`` and ``device.server`` call cuda. A module of
tasks calls it where it is imported, which is before a rank chooses its devices.
"""

import os
import threading

import torch
from torch.utils import backend_registration as registration
from torch.utils._pytree import tree_map

from paramserver import devices

NAME = "fakegpu"
_CPU_KERNEL = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_COPIES = {"aten::copy_", "aten::_copy_from", "aten::_foreach_copy_"}

_lock = threading.RLock()
_memory = {}  # the storage of the CPU behind each storage of this device, by its address
_pending = []  # copies to the CPU that no thread has waited for
synchronized = []  # devices whose stream a thread has waited for


class Stream:
    def __init__(self, device):
        self.device = torch.device(device)

    def synchronize(self):
        with _lock:
            synchronized.append(self.device)
            while _pending:
                target, source = _pending.pop(0)
                target.copy_(source)


class Module(registration._DummyBackendModule):
    """What torch finds as ``torch.fakegpu``."""

    def __init__(self, gpus):
        self.gpus = gpus
        self.random_states = {}
        self.current = None

    def device_count(self):
        return self.gpus

    def current_stream(self, device=None):
        return Stream(device)

    def set_device(self, device):
        self.current = torch.device(device)

    def get_rng_state(self, device):
        # Another one in each process, so that a process that does not restore it is found.
        fresh = torch.tensor(list(os.urandom(16)), dtype=torch.uint8)
        return self.random_states.setdefault(torch.device(device), fresh)

    def set_rng_state(self, state, device):
        self.random_states[torch.device(device)] = state


def install(gpus=1):
    """Register the device, once, and let this process take it for its GPUs; return what torch finds as its module."""
    if NAME not in dir(torch):
        registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module(gpus))
        _all.fallback(_run, "PrivateUse1")
        # Names that torch has for devices of this kind only.
        _named.impl("convolution_overrideable", _convolve, "PrivateUse1")
        _named.impl("convolution_backward_overrideable", _convolve_backward, "PrivateUse1")
        # Otherwise ``Module.to`` makes new parameters on such devices, and not on a GPU, so tied ones come apart.
        torch.__future__.set_swap_module_params_on_conversion(True)
    devices.GPU = NAME
    return torch.get_device_module(NAME)


def _is_here(value):
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _on_cpu(tensor):
    """The same memory, as a tensor of the CPU."""
    storage = _memory[tensor.untyped_storage()._cdata]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _show(tensor, storage, like):
    """Let a tensor of this device be over ``storage``, with the place and shape of ``like``."""
    place = like.storage_offset(), like.shape, like.stride()
    return torch.ops.aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNEL, tensor, storage, *place)


def _over(storage, like):
    return _show(torch._C._acc.create_empty_tensor((0,), like.dtype), storage, like)


def _storage(held):
    """A storage of this device in the memory of one of the CPU."""
    storage = torch._C._construct_storage_from_data_pointer(held.data_ptr(), torch.device(NAME, 0), held.nbytes())
    _memory[storage._cdata] = held  # until there is another storage at this address
    return storage


def _run(op, *args, **kwargs):
    with _lock, torch._C._AutoDispatchBelowAutograd():
        if op._schema.name in _COPIES:
            return _copy(op, *args, **kwargs)
        return _compute(op, args, kwargs)


def _compute(op, args, kwargs):
    aliases = []

    def take(value):
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if _is_here(value):
            aliases.append((value, _on_cpu(value)))
            return aliases[-1][1]
        if isinstance(value, torch.Tensor) and value.dim():
            raise RuntimeError(f"{op} expected all tensors to be on the same device, and one is on {value.device}")
        return value

    def give(value):
        if not isinstance(value, torch.Tensor):
            return value
        for original, alias in aliases:
            if value is alias:
                return original
        for original, alias in aliases:
            if value.untyped_storage()._cdata == alias.untyped_storage()._cdata:
                return _over(original.untyped_storage(), value)
        return _over(_storage(value.untyped_storage()), value)

    result = op(*tree_map(take, args), **tree_map(take, kwargs))
    for original, alias in aliases:
        if original.shape != alias.shape:  # the operation has resized what it wrote to
            _show(original, _storage(alias.untyped_storage()), alias)
    return tree_map(give, result)


def _convolve(*args):
    return _run(torch.ops.aten.convolution.default, *args)


def _convolve_backward(gradient, inputs, weight, *others):
    *how, mask = others
    return _run(torch.ops.aten.convolution_backward.default, gradient, inputs, weight, [weight.shape[0]], *how, mask)


def _copy(op, first, second, non_blocking=False):
    if op._schema.name == "aten::_foreach_copy_":
        for target, source in zip(first, second, strict=True):
            _copy(torch.ops.aten.copy_.default, target, source, non_blocking)
        return None
    target, source = (second, first) if op._schema.name == "aten::_copy_from" else (first, second)
    own, other = (_on_cpu(tensor) if _is_here(tensor) else tensor for tensor in (target, source))
    if non_blocking and not _is_here(target):
        _pending.append((own, other.clone()))
    else:
        own.copy_(other)
    return target


_all = torch.library.Library("_", "IMPL")
_named = torch.library.Library("aten", "IMPL")
