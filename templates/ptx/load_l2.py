from cutlass import Int64

from .load_words import load_words


def load_l2(address, count=4):
    """Loads words that an earlier kernel wrote, from L2."""
    return load_words("ld.global.cg", Int64(address), count)
