"""What examples in docstrings assume: `np`, `md`, `spmd` and `P`, where the module has no other meaning for them."""

from _pytest.doctest import DoctestItem


def pytest_itemcollected(item):
    """Examples in pages import what they need, since a reader may begin with any of them."""
    if isinstance(item, DoctestItem) and item.path.suffix == ".py":
        import numpy

        import minidiff
        import spmd

        names = {"np": numpy, "md": minidiff, "spmd": spmd, "P": spmd.P}
        item.dtest.globs.update({**names, **item.dtest.globs})
