from cutlass import Int32

from .load_words import load_words


def load_shared(address, count=4):
    """Loads words from this block's shared memory."""
    return load_words("ld.shared", Int32(address), count)
