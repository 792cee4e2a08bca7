from .store_words_if import store_words_if


def store_fragment_if(present, address, words):
    """Stores words, up to a fragment of four, where ``present``."""
    store_words_if("st.global", "b32", present, address, words)
