"""The README's examples run as pasted."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs_as_pasted(example, tmp_path):
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, timeout=600)


def test_there_is_an_example_and_a_picture():
    assert EXAMPLES
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / picture).exists()
