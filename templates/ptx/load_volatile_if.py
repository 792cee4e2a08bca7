from .load_words_if import load_words_if


def load_volatile_if(present, address, count=4):
    """Loads words that another device may be writing, or gives zeros."""
    return load_words_if("ld.volatile.global", present, address, count)
