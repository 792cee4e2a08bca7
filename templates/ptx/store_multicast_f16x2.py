from .store_words import store_words


def store_multicast_f16x2(address, words):
    """Stores words to the same place in every rank's memory."""
    store_words("multimem.st.relaxed.sys.global", "f16x2", address, words)
