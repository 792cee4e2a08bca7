"""A rough model of a boundary's time: which token groups serve which M.

Its constants are what an H200 took for hidden 4096 and four streams, TP 2 looped back
(docs/measurements.md). They order the groups that the plan picks from, and spare
`mhcgen tune` hopeless candidates.
"""

FIXED = 2.15  # microseconds, whatever is done
PER_TOKEN = 0.46  # for a block's 2048 elements of a token
ELEMENTS = 2048
SECOND_OCTET = 0.45  # for each eight tokens beyond the first, which project anew
HIDDEN_BYTES = 13e6  # of fn a microsecond, while a boundary before it still runs
EXPOSED_BYTES = 5.6e6  # and where its blocks leave that one no room


def predicted(
    tokens: int, group: int, wave: int, blocks: int, elements: int, fn_bytes: int
) -> float:
    """Microseconds of a boundary, roughly.

    Args:
        tokens: M.
        group: Tokens of a cluster.
        wave: Clusters that run at once, ``blocks`` blocks a multiprocessor.
        blocks: Blocks that share a multiprocessor, where there are so many.
        elements: Columns of all streams that a block serves.
        fn_bytes: Bytes of fn, all of which every cluster loads.
    """
    clusters = -(-tokens // group)
    waves = -(-clusters // wave)
    together = min(clusters, wave)
    alone = wave // blocks  # clusters that have their multiprocessors to themselves
    sharing = blocks if together > alone else 1
    token = PER_TOKEN * elements / ELEMENTS
    exposed = max(0, together - alone // 2)
    loads = (together - exposed) / HIDDEN_BYTES + exposed / EXPOSED_BYTES
    octets = -(-min(group, tokens) // 8)
    return waves * (
        FIXED
        + token * min(group, tokens) * sharing
        + SECOND_OCTET * (octets - 1)
        + fn_bytes * loads
    )
