"""Compile-time stand-ins for kernel arguments."""

from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


def tensor(dtype, *shape):
    """A contiguous row-major tensor at a 16-byte boundary."""
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)


def current_stream():
    """The stream that is current in the calling framework at each launch."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
