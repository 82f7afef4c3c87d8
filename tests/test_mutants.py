"""The mutants of `make mutants` fit the code as it is: each changes one place, and is still Python."""

import ast
import pathlib

import pytest
from mutants.catalogue import MUTANTS

PACKAGE = pathlib.Path(__file__).parents[1] / "dp2_keras"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.bug)
def test_a_mutant_fits(mutant):
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    ast.parse(text.replace(mutant.old, mutant.new))
    assert all((PACKAGE.parent / name).exists() for name in mutant.tests.split())


def test_there_are_enough_and_no_two_are_the_same():
    assert len({mutant.bug for mutant in MUTANTS}) == len(MUTANTS) >= 25
    assert len({(mutant.file, mutant.new, mutant.old) for mutant in MUTANTS}) == len(MUTANTS)
