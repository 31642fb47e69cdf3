"""The documentation site builds without a warning, and its pages work in a browser: wide, narrow, offline."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urljoin

import pytest
from browser import PROGRAM, Browser, browse, served

from femixer.models import FEMConfig, FEMVisionConfig, ForecastConfig

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.delivery
WIDTHS = (1280, 390)
"""Of a desk, where a page is loaded, and of a phone."""

SEEN = """(() => {
  const visible = (e) => { const box = e.getBoundingClientRect(); return box.width > 8 && box.height > 8; };
  const every = (selector) => [...document.querySelectorAll("article " + selector)];
  const prose = (e) => {
    const copy = e.cloneNode(true);
    copy.querySelectorAll("code").forEach((code) => code.remove());
    return copy.textContent;
  };
  const wide = [...document.querySelectorAll("article *")].filter((e) => {
    for (let up = e.parentElement; up && up.tagName != "ARTICLE"; up = up.parentElement)
      if (getComputedStyle(up).overflowX != "visible") return false;
    return e.getBoundingClientRect().right > innerWidth + 1;
  });
  return {
    width: document.documentElement.scrollWidth,
    wide: wide.map((e) => e.outerHTML.slice(0, 120)),
    images: every("img").filter((e) => !(e.complete && e.naturalWidth > 8 && visible(e))).map((e) => e.src),
    pictures: every("img").length,
    formulas: every("math").length,
    hidden: every("math").filter((e) => e.getBoundingClientRect().height < 4).length,
    raw: every("p, li, td").map(prose).join(" ").match(/\\$\\$|\\\\frac|\\\\mathcal/g),
    text: document.querySelector("article").innerText.length,
    size: parseFloat(getComputedStyle(document.querySelector("article p") || document.body).fontSize),
  };
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        *["-W", "ignore", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"],
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def pages(site: Path) -> list[str]:
    found = [path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")]
    return sorted("" if name == "." else f"{name}/" for name in found)


def test_every_document_is_a_page_and_every_link_leads_somewhere(site: Path) -> None:
    names = set(pages(site))
    assert {f"{path.stem}/" for path in (ROOT / "docs").glob("*.md")} <= names
    assert {f"examples/{path.stem}/" for path in (ROOT / "examples").glob("*.ipynb")} <= names
    for name in names:
        text = (site / name / "index.html").read_text(encoding="utf-8")
        for link in re.findall(r'(?:href|src)="([^"#?]+)', text):
            if not re.match(r"[a-z]+:|//", link):
                target = site / urljoin(f"http://x/{name}", link).removeprefix("http://x/")
                assert target.is_file() or (target / "index.html").is_file(), f"{name or 'home'}: {link}"


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="((?:https?:)?//[^"]+)', text)
        assert not [url for url in loaded if 'rel="canonical"' not in url], path
        assert "mermaid" not in text


def test_the_reference_has_docstrings(site: Path) -> None:
    text = (site / "reference" / "layer" / "index.html").read_text(encoding="utf-8")
    assert "reads, per channel, between mean and free energy of a prior" in text


@pytest.mark.parametrize("kind", [FEMConfig, FEMVisionConfig, ForecastConfig])
def test_the_reference_says_what_every_field_of_a_configuration_is(site: Path, kind: type) -> None:
    text = (site / "reference" / "models" / "index.html").read_text(encoding="utf-8")
    (start,) = [match.start() for match in re.finditer(rf'<h2 id="femixer.models.{kind.__name__}"', text)]
    section = text[start : text.index("<h2 ", start + 1)]
    fields = inspect.get_annotations(kind)
    assert len(fields) > 10
    assert [name for name in fields if not re.search(rf"<b><code>(<span[^>]*>)?{name}<", section)] == []


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")
def test_pages_work_in_a_browser_wide_and_narrow(site: Path, tmp_path: Path) -> None:
    async def look(browser: Browser) -> list[str]:
        wrong = []
        for name in pages(site):
            for width in WIDTHS:
                where = f"{name or 'home'} at {width}: "
                show = browser.open if width == WIDTHS[0] else browser.resize
                wrong += [where + problem for problem in await show(address + name, width)]
                seen = await browser.evaluate(SEEN)
                wrong += [where + f"{seen['width']} wide"] * (seen["width"] > width)
                wrong += [where + f"beyond the edge: {element}" for element in seen["wide"]]
                wrong += [where + f"no picture: {image}" for image in seen["images"]]
                wrong += [where + "invisible formulas"] * (seen["hidden"] > 0)
                wrong += [where + f"TeX as text: {seen['raw']}"] * (seen["raw"] is not None)
                wrong += [where + "no text"] * (seen["text"] < 100)
                wrong += [where + f"letters of {seen['size']} pixels"] * (seen["size"] < 12)
                if name == "equations/":
                    assert seen["formulas"] > 20
                if name == "gallery/":
                    assert seen["pictures"] >= 6
        return wrong

    with served(site) as address:
        assert browse(look, tmp_path) == []


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium")
def test_search_finds_and_dark_mode_is_dark(site: Path, tmp_path: Path) -> None:
    async def use(browser: Browser) -> tuple[str, str, str]:
        await browser.open(address)
        light = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
        await browser.evaluate("document.querySelector('label.md-header__button[title=Dark]').click()")
        dark = await browser.evaluate("getComputedStyle(document.body).backgroundColor")
        found = await browser.evaluate(
            """new Promise((done) => {
              const field = document.querySelector(".md-search__input");
              field.focus();
              field.value = "hidden temperature";
              field.dispatchEvent(new Event("input", { bubbles: true }));
              field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
              const look = setInterval(() => {
                const list = document.querySelector(".md-search-result__list");
                if (list && list.children.length) { clearInterval(look); done(list.innerText || list.textContent); }
              }, 50);
              setTimeout(() => done(""), 20000);
            })"""
        )
        return light, dark, found

    with served(site) as address:
        light, dark, found = browse(use, tmp_path)
    assert light == "rgb(255, 255, 255)"
    assert max(map(int, re.findall(r"\d+", dark)[:3])) < 64, dark
    assert "temperature" in found
