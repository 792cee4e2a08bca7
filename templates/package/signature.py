"""Compile-time stand-ins for kernel arguments, and what moved between DSL releases."""

from cutlass import BFloat16, Float16, Float32, Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

from .constants import CAPACITY, DESTINATIONS, GENERATIONS, HC, HIDDEN, MIX, TP

try:
    from cutlass.memory import SmemAllocator
except ModuleNotFoundError:  # before 4.8
    from cutlass.utils import SmemAllocator

__all__ = [
    "SmemAllocator",
    "boundary_arguments",
    "current_stream",
    "given_stream",
    "tensor",
]


def tensor(dtype, *shape):
    """A contiguous row-major tensor at a 16-byte boundary."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def given_stream():
    """A stream that each launch names, as an integer handle."""
    return make_fake_stream()


def current_stream():
    """The stream that is current in the calling framework at each launch."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)


#: if plan.tp > 1
def boundary_arguments(publishes):
    """Stand-ins for the arguments of a boundary, in order.

    Args:
        publishes: The transport of its own publish, or None.
    """
#: else
def boundary_arguments():
    """Stand-ins for the arguments of a boundary, in order."""
#: endif
    tokens = cute.sym_int32()
    return (
#: if plan.tp > 1
        tensor(«plan.activation_type», tokens, HIDDEN) if publishes else None,
        tensor(Int64, DESTINATIONS[publishes]) if publishes else None,
        Int32(0),
#: else
        tensor(«plan.activation_type», tokens, HIDDEN),
#: endif
        tensor(«plan.activation_type», tokens, HC, HIDDEN),
        tensor(Float32, tokens, HC, 1),
        tensor(Float32, tokens, HC, HC),
        tensor(«plan.fn_type», MIX, HC * HIDDEN),
#: if plan.delayed
        tensor(Float32, tokens, HC),
#: else
        tensor(Float32, 3),
        tensor(Float32, MIX),
#: endif
#: if plan.norm_weight != "none"
        tensor(«plan.activation_type», HIDDEN),
#: endif
#: if plan.tp > 1
        tensor(«plan.activation_type», GENERATIONS, TP, CAPACITY, HIDDEN),
        tensor(Int32, 2),
#: endif
        tensor(«plan.activation_type», tokens, HC, HIDDEN),
#: if plan.tail
        tensor(Float32, tokens, HC, 1),
        tensor(Float32, tokens, HC, HC),
#: else
        tensor(Float32, tokens, MIX),
#: endif
        tensor(«plan.activation_type», tokens, HIDDEN),
#: if plan.stream_mean
        tensor(«plan.activation_type», tokens, HIDDEN),
#: endif
        current_stream(),
    )
