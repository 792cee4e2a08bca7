"""Compile-time stand-ins for kernel arguments, and what moved between DSL releases."""

from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

try:
    from cutlass.memory import SmemAllocator
except ModuleNotFoundError:  # before 4.8
    from cutlass.utils import SmemAllocator

__all__ = ["SmemAllocator", "current_stream", "given_stream", "tensor"]


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
