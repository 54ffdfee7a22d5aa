"""MkDocs hooks: README, CONTRIBUTING and examples/ become pages too, and llms.txt (https://llmstxt.org) lists all."""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)([^)\s]*)\)")


def sources() -> dict[Path, str]:
    """File of the repository → its name on the site."""
    examples = {path: f"examples/{path.name}" for path in sorted(ROOT.glob("examples/*.md"))}
    pages = {path: path.name for path in sorted(ROOT.glob("docs/*.md"))}
    return {ROOT / "README.md": "index.md", **pages, ROOT / "CONTRIBUTING.md": "contributing.md", **examples}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, name in sources().items():
        if path.parent != ROOT / "docs":
            files.append(File.generated(config, name, content=path.read_text()))
    files.append(File.generated(config, "llms.txt", content=llms_txt()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at pages of the site; a link to another file of the repository becomes text."""
    names = sources()
    [source] = [path for path, name in names.items() if name == page.file.src_uri]

    def pointed(link: re.Match[str]) -> str:
        text, target, anchor = link.groups()
        name = names.get((source.parent / target).resolve())
        return f"[{text}]({relpath(name, Path(page.file.src_uri).parent)}{anchor})" if name else text

    return LINK.sub(pointed, markdown).replace("](docs/pictures/", "](pictures/")


def llms_txt() -> str:
    """Title, link and first sentence of every page."""
    lines = ["# Trinity Flows", ""]
    for path, name in sources().items():
        heading, *paragraphs = path.read_text().split("\n\n")
        first = next((text for text in paragraphs if text[:1].isalpha()), "")
        sentence = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", " ".join(first.split())).split(". ")[0]
        lines.append(f"- [{heading.removeprefix('# ')}]({name.removesuffix('.md')}.html): {sentence}")
    return "\n".join(lines) + "\n"
