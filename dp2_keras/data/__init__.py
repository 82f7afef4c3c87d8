"""Data sets: the paper's three, and a synthetic one for examples and tests.

    ((x_train, y_train), (x_test, y_test)) = imdb("imdb.npz")

Names are imported when they are first used. None of the modules imports TensorFlow or TFF before a
function needs it.
"""

from dp2_keras._lazy import exports

_MODULES = {
    "download": "DownloadError fetch",
    "imdb_reviews": "imdb",
    "movielens_ratings": "movielens",
    "reviews": "synthetic_reviews",
    "stackoverflow_cache": "stackoverflow stackoverflow_description",
    "stackoverflow_preparation": "prepare_stackoverflow",
    "tff_database": "build_tff_database read_tff_counts",
}
__getattr__, __dir__, __all__ = exports(__name__, _MODULES)  # noqa: PLE0605
