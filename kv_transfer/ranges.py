"""Reads of neighbours in memory become one."""


def merge_ranges(addresses: list[int], size: int) -> list[tuple[int, int]]:
    """(address, bytes) of blocks in order, neighbours in memory joined into one range (FAULTS P07)."""
    ranges: list[tuple[int, int]] = []
    for address in addresses:
        if ranges and sum(ranges[-1]) == address:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
        else:
            ranges.append((address, size))
    return ranges
