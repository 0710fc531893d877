"""Have accelerate prepare models for FSDP2 on a CPU. It knows FSDP only on accelerators, but nothing in its
preparation needs one: only the state that chooses the engine does."""

import contextlib
import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin


@contextlib.contextmanager
def fsdp2(**options) -> Iterator[None]:
    """Within, an Accelerator that is made prepares for FSDP2, as after `accelerate launch` with TRL's fsdp2.yaml.

    options: of `FullyShardedDataParallelPlugin`.
    """
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **{"cpu_ram_efficient_loading": False, **options}
    )
    init = AcceleratorState.__init__

    def state(self, *args, **kwargs):
        fresh = not AcceleratorState._shared_state
        init(self, *args, **kwargs)
        if fresh:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_FSDP", "true")
        patch.setenv("FSDP_VERSION", "2")
        patch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", str(plugin.cpu_ram_efficient_loading))
        patch.setattr(AcceleratorState, "__init__", state)
        yield
    forget()


def forget() -> None:
    """Let the next Accelerator of this process choose its engine again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
