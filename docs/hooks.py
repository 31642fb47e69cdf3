"""What the site has besides docs/*.md: pages made of other files of the repository, links to them, and MathML.

Links are written as they work in the repository (`docs/lm.md`, `../src/femixer/kernels/README.md`), and lead on the
site to the page of that file, or to a copy of it where it is no page.
"""

import json
import os
import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "src/femixer/kernels/README.md": "kernels.md",
    "src/femixer/reporting/README.md": "tables.md",
} | {f"examples/{path.name}": f"examples/{path.stem}.md" for path in sorted((ROOT / "examples").glob("*.ipynb"))}
"""Files that become pages."""
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)]*)?(\))")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
MATH = re.compile(r'<(div|span) class="arithmatex">(.*?)</\1>', re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Pages that no section names are in the last one."""
    assert config.nav is not None
    named = set(_leaves(config.nav))
    written = [path.relative_to(config.docs_dir).as_posix() for path in sorted(Path(config.docs_dir).glob("**/*.md"))]
    others = [name for name in [*written, *PAGES.values()] if name not in named]
    if others:
        config.nav.append({"More": others})


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Pages made of other files, and copies of files that pages link to."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, content=_markdown(ROOT / source)))
    copies = {source for source in PAGES if source.endswith(".ipynb")}
    for file in files.documentation_pages():
        for target in _targets(file.content_string, _origin(file.src_uri)):
            if target not in PAGES and not target.startswith("docs/"):
                copies.add(target)
    for target in sorted(copies):
        files.append(File.generated(config, f"files/{target}", content=(ROOT / target).read_bytes()))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    origin, here = _origin(page.file.src_uri), os.path.dirname(page.file.src_uri)

    def site_link(match: re.Match[str]) -> str:
        target = _target(match[2], origin)
        if target is None:
            return match[0]
        name = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else f"files/{target}")
        return f"{match[1]}{os.path.relpath(name, here or '.')}{match[3] or ''}{match[4]}"

    pieces = FENCE.split(markdown)
    return "".join(piece if piece.startswith("```") else LINK.sub(site_link, piece) for piece in pieces)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, which browsers draw themselves."""

    def mathml(match: re.Match[str]) -> str:
        block = match[1] == "div"
        latex = unescape(match[2]).strip().removeprefix("\\(").removesuffix("\\)")
        latex = latex.removeprefix("\\[").removesuffix("\\]").strip()
        drawn = convert(latex, display="block" if block else "inline")
        return f'<div class="formula">{drawn}</div>' if block else drawn

    return MATH.sub(mathml, html)


def _leaves(nav: Any) -> Iterable[str]:
    """The files that a navigation names."""
    if isinstance(nav, str):
        yield nav
    for entry in nav if isinstance(nav, list) else nav.values() if isinstance(nav, dict) else ():
        yield from _leaves(entry)


def _origin(name: str) -> str:
    """The file of the repository that a page is made of."""
    return {page: source for source, page in PAGES.items()}.get(name, f"docs/{name}")


def _targets(text: str, origin: str) -> Iterable[str]:
    for match in LINK.finditer(FENCE.sub("", text)):
        target = _target(match[2], origin)
        if target is not None:
            yield target


def _target(link: str, origin: str) -> str | None:
    """The file of the repository that a link in `origin` leads to, None if it leads elsewhere or nowhere."""
    if re.match(r"[a-z]+:", link):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(origin), link))
    return path if (ROOT / path).is_file() else None


def _markdown(path: Path) -> str:
    """A file as a page: Markdown as it is, a notebook as its texts and its code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    parts = ["".join(c["source"]) if c["cell_type"] == "markdown" else _code("".join(c["source"])) for c in cells]
    title, *rest = parts[0].split("\n", 1)
    source = f"This page is the notebook [{path.name}](../files/examples/{path.name}), without its outputs."
    return "\n\n".join([title, source, *rest, *parts[1:]]) + "\n"


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
