"""What benchmarks with pictures end with: the pictures, where what draws them is installed."""

from pathlib import Path


def leave_pictures(result: Path) -> None:
    """Draw a result's JSON, beside it; says what came of it, and is no error whatever that is."""
    try:
        from benchmarks.plot import plot_all
    except ModuleNotFoundError as error:
        print(f"no pictures without {error.name}: pip install 'headrace[bench]'")
        return
    plot_all([result], None, print)
