from cutlass import Int32

from .as_float import as_float
from .load_words import load_words


def load_floats_shared(address, count=4):
    """Loads FP32 values from this block's shared memory."""
    return [as_float(word) for word in load_words("ld.shared", Int32(address), count)]
