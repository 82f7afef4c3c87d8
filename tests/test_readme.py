"""The examples of the README and of the recipes run as pasted."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/recipes.md")}
EXAMPLES = [
    pytest.param(example, id=f"{name}-{number}")
    for name, text in TEXTS.items()
    for number, example in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_as_pasted(example, tmp_path):
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, timeout=600)


def test_there_is_an_example_and_a_picture():
    assert len(EXAMPLES) >= len(TEXTS)
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", TEXTS["README.md"]):
        assert (ROOT / picture).exists()
