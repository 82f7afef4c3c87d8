"""Packaging of dp2_keras. Tool settings are in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "dp2_keras/__init__.py").read_text()).group(1)

setup(
    name="dp2-keras",
    version=VERSION,
    description="Differentially private Keras with delayed preconditioners (DP²)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["dp2_keras", "dp2_keras.*"]),
    package_data={"dp2_keras.experiments": ["configurations/*.json"]},
    entry_points={"console_scripts": ["dp2 = dp2_keras.cli:main"]},
    python_requires=">=3.9",
    install_requires=["tensorflow>=2.14", "dp-accounting>=0.4.3", "attrs", "numpy", "scipy"],
    extras_require={
        "plots": ["matplotlib"],
        "secure": ["cryptography"],
        "tf-privacy": ["tensorflow-privacy==0.9.0"],
        "dev": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "scipy",
            "matplotlib",
            "tensorboard",
            "cryptography",
            "ruff",
        ],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
