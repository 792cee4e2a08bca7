from cutlass import Int32

from .store_words import store_words


def store_shared(address, words):
    """Stores words to this block's shared memory."""
    store_words("st.shared", "b32", Int32(address), words)
