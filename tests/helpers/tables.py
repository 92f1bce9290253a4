"""Tables in text: a line for each row, and bars between its cells."""


def rows(text):
    """Returns the cells of each row, which may be empty.

    >>> rows("a | 1 2\\nb |")
    [['a', '1 2'], ['b', '']]
    """
    return [
        [cell.strip() for cell in f"{line} ".split(" | ")] for line in text.strip().splitlines()
    ]


def numbers(text):
    """Reads whole numbers between spaces, as in a shape."""
    return tuple(map(int, text.split()))
