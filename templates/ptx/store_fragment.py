from .store_words import store_words


def store_fragment(address, words):
    """Stores words, up to a fragment of four."""
    store_words("st.global", "b32", address, words)
