"""Data sets: the paper's three, and a synthetic one for examples and tests.

    ((x_train, y_train), (x_test, y_test)) = imdb("imdb.npz")

Names are imported when they are first used. None of the modules imports TensorFlow or TFF before a
function needs it.
"""

import importlib

_MODULES = {
    "download": "DownloadError fetch",
    "imdb_reviews": "imdb",
    "movielens_ratings": "movielens",
    "reviews": "synthetic_reviews",
    "stackoverflow_cache": "stackoverflow stackoverflow_description",
    "stackoverflow_preparation": "prepare_stackoverflow",
    "tff_database": "build_tff_database read_tff_counts",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOMES})
