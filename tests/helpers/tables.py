"""Reads tables in text: a line for each row, and bars between its cells."""


def rows(text):
    """Returns the cells of each row, which may be empty.

    >>> rows("a | 1 2\\nb |")
    [['a', '1 2'], ['b', '']]
    """
    table = []
    for line in text.strip().splitlines():
        table.append([cell.strip() for cell in f"{line} ".split(" | ")])
    return table


def numbers(text):
    """Reads whole numbers between spaces, as in a shape."""
    return tuple(map(int, text.split()))
