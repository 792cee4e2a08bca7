from cutlass import Int64

from .load_words import load_words


def load_constant(address):
    """Loads four words that no kernel writes while this one runs.

    Not by ``ld.global.nc``: the compiler sinks those behind a wait for other kernels.
    """
    return load_words("ld.global", Int64(address), 4)
