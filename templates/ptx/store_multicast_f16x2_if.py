from .store_words_if import store_words_if


def store_multicast_f16x2_if(present, address, words):
    """Stores words to the same place in every rank's memory where ``present``."""
    opcode = "multimem.st.relaxed.sys.global"
    store_words_if(opcode, "f16x2", present, address, words)
