"""The only module that uses private parts of torch and tensordict."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)

from replaykit.keywords import functions_of

__all__ = [  # of tensordict, for other modules
    "LazyStackedTensorDict",
    "NonTensorData",
    "NonTensorStack",
    "TensorDict",
    "TensorDictBase",
    "is_non_tensor",
]

_PACKAGE = __name__.partition(".")[0]
_PARTS = {"_device", "_tensordict", "_batch_size", "_td_dim_names"}


def _has_known_parts() -> bool:
    """Return whether a TensorDict has only a plain dict and three other attributes."""
    make = getattr(TensorDict, "_new_unsafe", None)
    if make is None:
        return False
    found = make({}, batch_size=torch.Size())
    return set(vars(found)) == _PARTS and type(found._tensordict) is dict


_KNOWN_PARTS = _has_known_parts()

TENSORDICT_PARTS = ("_batch_size", "_tensordict") if _KNOWN_PARTS else None
"""The attributes of a TensorDict with its batch size and its fields, or None if these differ."""


_LAYOUT = ("is_locked", "batch_size", "device")

layout_of: Callable[[TensorDict], tuple[bool, torch.Size, torch.device | None]] = attrgetter(
    *(
        f"_{name}" if _KNOWN_PARTS and hasattr(TensorDict, "_is_locked") else name
        for name in _LAYOUT
    )
)
"""Returns whether a plain TensorDict is locked, its batch size and its device, in one call."""


def new_tensordict(
    fields: dict[str, Any], batch_size: torch.Size, device: torch.device | None
) -> TensorDict:
    """Return a TensorDict over ``fields`` without checking or copying them.

    The caller guarantees that the shape of every field starts with ``batch_size``, and that it is
    on ``device``. The caller must not use ``fields`` afterwards. The call is about ten times
    cheaper than the public constructor.
    """
    if not _KNOWN_PARTS:
        return TensorDict(fields, batch_size=batch_size, device=device)
    data = TensorDict.__new__(TensorDict)
    data._device = device
    data._tensordict = fields
    data._batch_size = batch_size
    data._td_dim_names = None
    return data


Template = tuple[torch.Size, list[tuple[str, int, Any]]]
"""The extra batch dimensions of a TensorDict, and its names with leaves or templates."""


def filled(
    template: Template,
    leaves: Sequence[torch.Tensor],
    batch: torch.Size,
    device: torch.device | None,
) -> TensorDict:
    """Return nested TensorDicts over leaves, as ``new_tensordict`` does.

    It does not call ``new_tensordict``, because each sample would make a call per container.
    """
    extra, children = template
    fields: dict[str, Any] = {}
    for part, place, child in children:
        fields[part] = leaves[place] if child is None else filled(child, leaves, batch, device)
    if extra:
        batch = batch + extra
    if not _KNOWN_PARTS:
        return TensorDict(fields, batch_size=batch, device=device)
    data = TensorDict.__new__(TensorDict)
    data._device = device
    data._tensordict = fields
    data._batch_size = batch
    data._td_dim_names = None
    return data


def fresh_strided(
    memories: Sequence[torch.Tensor] | Mapping[torch.dtype, torch.Tensor],
    parts: Iterable[tuple[Any, torch.Size, tuple[int, ...], int]],
) -> list[torch.Tensor]:
    """Return tensors over given memory that autograd treats as independent.

    Views would share one version counter. After a change of one view, autograd would refuse to
    differentiate results that were computed from another view.

    Args:
        parts: for each tensor the position or key of its memory, the shape, the strides, and the
            offset of its first value.
    """
    with _BelowViews() if _BelowViews is not None else contextlib.nullcontext():
        return [memories[at].as_strided(size, step, first) for at, size, step, first in parts]


_BelowViews: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)


def fields_of(data: TensorDict) -> dict[str, Any]:
    """Return the values of a plain TensorDict by name, as a read-only dict."""
    return data._tensordict if _KNOWN_PARTS else dict(data.items())


def has_names(data: TensorDictBase) -> bool:
    """Return whether dimensions of a TensorDict have names."""
    if _KNOWN_PARTS and type(data) is TensorDict:
        return data._td_dim_names is not None
    return any(name is not None for name in data.names)


def put_all(data: TensorDict, values: Mapping[str, torch.Tensor]) -> None:
    """Set values without checks.

    Batch size and device must fit, and the TensorDict must not be locked.
    """
    if _KNOWN_PARTS:
        data._tensordict.update(values)
    else:
        for key, value in values.items():
            data.set(key, value)


def is_tensordict(data: object) -> bool:
    """Return whether ``data`` is a TensorDict, but no tensorclass or non-tensor data."""
    if type(data) is TensorDict:  # saves the checks of subclasses in every sample and update
        return True
    return isinstance(data, TensorDictBase) and not is_tensorclass(data)


def holds_objects(data: Any) -> bool:
    """Return whether ``data`` is a plain TensorDict with values that are not tensors."""
    if type(data) is not TensorDict:
        return False
    return any(is_non_tensor(value) or holds_objects(value) for value in data.values())


def tensorclass_parts(data: Any) -> tuple[TensorDictBase, dict[str, Any]]:
    """Return the TensorDict of a tensorclass, and its non-tensor fields by name."""
    constants = dict(getattr(data, "_non_tensordict", {}) or {})
    tensordict = data._tensordict
    has_others = any(is_non_tensor(value) for value in tensordict.values())
    tensors = tensordict.copy() if has_others else tensordict
    for key, value in list(tensordict.items()):
        if is_non_tensor(value):
            constants[key] = value.data if isinstance(value, NonTensorData) else value.tolist()
            del tensors[key]
    return tensors, {key: value for key, value in constants.items() if value is not None}


def arange(*bounds: int) -> torch.Tensor:
    """Return ``torch.arange`` on the CPU, for any default device of the caller."""
    return torch.arange(*bounds, device="cpu")


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor unchanged, and any other value as a tensor on the CPU.

    ``torch.as_tensor`` would use the caller's default device.
    """
    if isinstance(value, torch.Tensor):
        return value if dtype is None else value.to(dtype)
    return torch.as_tensor(value, dtype=dtype, device="cpu")


def clone(data: Any) -> Any:
    """Return a copy of a tensor, TensorDict or tensorclass."""
    try:
        return data.clone()
    except NotImplementedError:
        # tensordict copies by adding 0, which torch does not support for all dtypes.
        return data.apply(torch.clone)


def lookup(data: Any, key: tuple[str, ...]) -> Any:
    """Return the value of a nested key, or None if there is none."""
    for part in key:
        if type(data) is TensorDict:
            found = fields_of(data).get(part)
            if found is None or type(found) in (torch.Tensor, TensorDict):
                data = found
                continue
        known = is_tensordict(data) or is_tensorclass(data)
        data = data.get(part, None) if known else None
    return data


def new_tensorclass(cls: type, tensordict: TensorDictBase, constants: Mapping[str, Any]) -> Any:
    """Return a tensorclass ``cls`` over ``tensordict`` and non-tensor fields."""
    return cls.from_tensordict(tensordict, dict(constants) or None)  # type: ignore[attr-defined]


def shared_bytes(nbytes: int) -> torch.Tensor:
    """Return memory, uint8 ``[nbytes]``, that other processes can use without a copy."""
    make = getattr(torch.UntypedStorage, "_new_shared", None)
    if make is None:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").share_memory_()
    block = torch.empty(0, dtype=torch.uint8, device="cpu")
    block.set_(make(nbytes), 0, (nbytes,), (1,))
    return block


def memory_users(tensor: torch.Tensor) -> int | None:
    """Return a count of the objects that hold the tensor's memory.

    The count includes views, arrays and references to the memory itself. The result is None if this
    version of torch does not report the count.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    memory = tensor.untyped_storage()
    return None if count is None else int(count(memory._cdata)) + sys.getrefcount(memory)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without the module, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_by_name(name: object) -> torch.dtype:
    """Return the dtype with this name, without evaluating any code.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"expected the name of a torch dtype, got {name!r}")
    return dtype


def _skipped_frames() -> Any:
    """Return a function that excludes a code object from torch.compile.

    This also excludes all functions that the code calls. The result is None if this version of
    torch does not support it.
    """
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    mark = getattr(frames, "set_code_exec_strategy", None)
    strategy = getattr(frames, "_FrameExecStrategy", None)
    action = getattr(frames, "_FrameAction", None)
    if mark is None or strategy is None or action is None:
        return None
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: mark(code, skip)


_skip_frames = _skipped_frames()


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Uncompiled:
    """Keep torch.compile from tracing the methods of this package's subclasses.

    A compiled function may call such a method, read a property or iterate. In such a place, the
    graph of the compiled function breaks, and the call runs uncompiled. ``torch.compiler.disable``
    does the same with a wrapper around every call. This class marks the functions themselves, so a
    call has no extra cost.

    Methods that are defined in other packages are not changed.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for part in cls.__mro__:
            if part.__module__.partition(".")[0] == _PACKAGE:
                for _, function in functions_of(part):
                    uncompiled(function)


def uncompiled(function: FunctionT) -> FunctionT:
    """Exclude a function, and all that it calls, from torch.compile."""
    if vars(function).get("_torchdynamo_disable"):
        return function
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "buffers and their parts run outside of compiled graphs"
    # The wrapper of another package's decorator shares its code with all other wrapped functions.
    inner: Any = inspect.unwrap(function)
    if _skip_frames is not None and inner.__module__.partition(".")[0] == _PACKAGE:
        _skip_frames(inner.__code__)
    return function
