"""The sizes of calls that commands take, such as ``1,3,64``."""

from mhcgen.errors import MhcgenError, count, shortened


def parse_tokens(text: str) -> list[int]:
    """The sizes of calls in a list, each once.

    Raises:
        MhcgenError: One is no number above 0.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if count(word) < 1:
            raise MhcgenError(
                f"--tokens {shortened(text)}: {shortened(word)!r} is no number of "
                "tokens; give some such as 1,8,64"
            )
    return list(dict.fromkeys(map(int, words)))
