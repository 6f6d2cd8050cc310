"""Tables as text, and their cells."""

from collections.abc import Sequence


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text, such as `4 x 8`."""
    return " x ".join(map(str, shape)) or "scalar"


def sizes_text(sizes: tuple[int, int, int] | None) -> str:
    """The sizes of matrices as text, such as `2 x (4, 8)`."""
    return "-" if sizes is None else f"{sizes[0]} x ({sizes[1]}, {sizes[2]})"


def aligned(rows: Sequence[Sequence[str]], *, numbers: int = 0) -> list[str]:
    """Lines with columns of equal width; the last `numbers` columns to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) - numbers
    return [
        "   ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
