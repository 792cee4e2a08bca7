from .load_words_if import load_words_if


def load_fragment_if(present, address, count=4):
    """Loads words, a fragment of four unless told otherwise, or gives zeros."""
    return load_words_if("ld.global", present, address, count)
