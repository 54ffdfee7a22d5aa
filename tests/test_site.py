"""The docs as a site: every link leads to a page, and llms.txt names all of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MKDOCS = ROOT / ".venv-docs/bin/mkdocs"


@pytest.mark.skipif(not MKDOCS.exists(), reason=f"{MKDOCS.parents[1]} is missing; make campaign makes it")
def test_site_is_built_and_lists_its_pages(tmp_path: Path) -> None:
    built = subprocess.run(
        [MKDOCS, "build", "--quiet", "--strict", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    pages = {page.stem for page in [*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]} | {"index", "contributing"}
    assert pages <= {page.stem for page in tmp_path.rglob("*.html")}
    listed = (tmp_path / "llms.txt").read_text()
    assert all(f"{page}.html" in listed for page in pages)
