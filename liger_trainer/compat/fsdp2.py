"""FSDP2 units whose whole weights stay in place: what that takes of torch (2.11 to 2.13) besides public methods.

FSDP2 gathers the weights of a unit into memory before its forward, sets them on its modules, and frees the memory when
they are not needed for a while. What is gathered next may lie elsewhere, so nothing that holds an address, such as a
CUDA graph, survives.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def param_groups(unit: Any) -> list[Any]:
    """Return the groups of weights that an FSDP2 unit gathers: one or none, or one a mesh."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # a release that knows no more than one
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class WholeWeights:
    """The whole weights of FSDP2 units, which are kept in place from `keep` to `undo`.

    Each is then one Parameter at one address. What is gathered stays until the backward of its unit, so a step gathers
    once, whatever `reshard_after_forward` says; and a frozen weight is not gathered again as long as nothing writes
    into its shard. Gradients and the optimizer remain sharded, and so are the weights for all who ask between steps:
    the units go through the same states as before.

    Args:
        units: modules that `fully_shard` was called on, one by one.
    """

    def __init__(self, units: Sequence[Any]):
        self._units = units
        self._groups = [(unit, group) for unit in units for group in param_groups(unit)]
        self._params = [param for _, group in self._groups for param in group.fsdp_params]
        self._by_shard: dict[int, Any] = {}
        self._undo = contextlib.ExitStack()

    @property
    def are_known(self) -> bool:
        """Whether all have been gathered once: before, there is no Parameter of the whole."""
        return all(hasattr(param, "_unsharded_param") for param in self._params)

    @property
    def bytes(self) -> int:
        """What they take when they are whole, in the dtype that they are gathered in."""
        return sum(map(_size, self._params))

    @property
    def gradient_bytes(self) -> int:
        """What their gradients take before they are shared out."""
        return sum(_size(param) for param in self._params if param.sharded_param.requires_grad)

    def of(self, parameter: Any) -> Any:
        """Return the whole of a weight whose shard or whole is found on a module."""
        param = self._by_shard.get(id(parameter))
        return parameter if param is None else param.unsharded_param

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the context the modules of all units have whole weights, as in their forwards, gathered or not."""
        shards = [param for param in self._params if not _is_set(param)]
        for param in shards:
            param._setattr_on_modules(param.unsharded_param)
        try:
            yield
        finally:
            for param in shards:
                param._setattr_on_modules(param.sharded_param)

    def keep(self) -> None:
        """Keep what is gathered from now on. All ranks have to do so between the same two passes."""
        for unit in self._units:
            self._undo.callback(_reshards_as_before(unit))
            unit.set_reshard_after_forward(False, recurse=False)
            # who gathers for many passes, as to sample, has it free weights after a forward again
            _set(self._undo, unit, "set_reshard_after_forward", lambda *args, **options: None)
        for param in self._params:
            self._by_shard[id(param.sharded_param)] = param
            _set(self._undo, param, "free_unsharded_param", lambda: None)
        for unit, group in self._groups:
            gathers = _GathersChanged(unit, group)
            _set(self._undo, group, "unshard", gathers.unshard)
            _set(self._undo, group, "wait_for_unshard", gathers.wait_for_unshard)

    def gather(self) -> None:
        """Gather all that is kept, between the same two passes on all ranks.

        So they lie next to one another in memory. What is gathered in a pass lies between what the pass needs for a
        while, and the allocator keeps the gaps.
        """
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for unit in self._units:
            unit.unshard()
            unit.reshard()

    def undo(self) -> None:
        """Give the units their own ways back, and the memory of the whole weights. A second call does nothing."""
        if not self._by_shard:
            return
        self._by_shard = {}
        self._undo.close()
        for unit in self._units:
            unit.reshard()
        for param in self._params:
            param.free_unsharded_param()  # one that is sharded already has kept its memory


class _GathersChanged:
    """A group of weights that gathers those that are trained, and those whose shards have changed.

    Frozen ones stay as they were gathered. A write into a shard shows in the versions of its tensors, except one
    through `.data`: PEFT's merging does that, so the merged adapters count too.
    """

    def __init__(self, unit: nn.Module, group: Any):
        self._group, self._params = group, list(group.fsdp_params)
        self._unshard, self._wait = group.unshard, group.wait_for_unshard
        self._merges = [vars(module) for module in unit.modules() if "merged_adapters" in vars(module)]
        self._seen: dict[int, Any] = {}  # by place: what was known of a frozen shard when it was gathered
        self._next: dict[int, Any] = {}  # the same, once what is being gathered has come
        self._gathered: list[int] = []  # places of those that are being gathered

    def unshard(self, async_op: bool = False) -> None:
        if self._group._all_gather_result is not None or self._group.is_unsharded:
            return
        merged = [tuple(attributes["merged_adapters"]) for attributes in self._merges]
        known = {place: self._knowledge(param, merged) for place, param in enumerate(self._params)}
        self._gathered = [place for place, now in known.items() if now is None or self._seen.get(place) != now]
        self._next = {place: now for place, now in known.items() if now is not None}
        if not self._gathered:
            return self._group._to_unsharded()
        with self._only_gathered():
            self._unshard(async_op)

    def wait_for_unshard(self) -> None:
        if self._group._all_gather_result is None:
            return
        with self._only_gathered():
            self._wait()
        for param in self._params:
            if not _is_set(param):
                param.to_unsharded()
        self._seen = self._next

    def _knowledge(self, param: Any, merged: list[tuple]) -> Any:
        """Return what changes with a frozen shard, None for a trained one: optimizers leave no trace in versions."""
        shard = param.sharded_param
        if shard.requires_grad or not hasattr(param, "_unsharded_param"):
            return None
        local: Tensor = shard._local_tensor
        whole = param.unsharded_param._version
        return id(shard), shard._version, local.data_ptr(), local._version, whole, merged

    @contextlib.contextmanager
    def _only_gathered(self) -> Iterator[None]:
        self._group.fsdp_params = [self._params[i] for i in self._gathered]
        try:
            yield
        finally:
            self._group.fsdp_params = self._params


def _size(param: Any) -> int:
    dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
    return param.sharded_param.numel() * dtype.itemsize


def _is_set(param: Any) -> bool:
    """Whether a weight's modules have the whole of it."""
    return param.sharded_state.name == "UNSHARDED"


def _reshards_as_before(unit: Any) -> Callable[[], None]:
    """Return what gives a unit the present answer to whether it frees weights after a forward."""
    state, groups = unit._get_fsdp_state(), param_groups(unit)
    automatic, meshes = state._auto_reshard_after_forward, [group.post_forward_mesh_info for group in groups]

    def restore() -> None:
        state._auto_reshard_after_forward = automatic
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh

    return restore


def _set(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object that has it from its class."""
    setattr(owner, name, value)
    undo.callback(delattr, owner, name)
