from cutlass import Int64

from .load_words import load_words


def load_fragment(address, count=4):
    """Loads words, a fragment of four unless told otherwise."""
    return load_words("ld.global", Int64(address), count)
