"""Make a site of all documents: plain HTML with a search over all sections, which works from the disk.

    docs/**/*.md, the written reference --write_site--> FOLDER/index.html, FOLDER/guide/flows.html, ..., FOLDER/search.js

Links between documents become links between pages, other links of the repository lead to its files. A link or an anchor that leads
nowhere is an error.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCS = Path(__file__).resolve().parent
GROUPS = {"": "Documentation", "guide": "Guide", "reference": "Reference", "internals": "Internals", "decisions": "Decisions"}
"""Folder -> its heading in the list of pages."""

_STYLE = """
body { margin: 0; display: grid; grid-template-columns: 17rem minmax(0, 52rem); gap: 2rem;
  font: 16px/1.5 system-ui, sans-serif; color: #1c1e21; }
nav { padding: 1rem; height: 100vh; overflow: auto; position: sticky; top: 0; box-sizing: border-box;
  background: #f5f6f8; font-size: 14px; }
nav h2 { font-size: 14px; margin: 1rem 0 .2rem; }
nav a { display: block; }
nav input { width: 100%; box-sizing: border-box; padding: .4rem; }
main { padding: 1rem 1rem 6rem; }
a { color: #0b5cad; }
a[aria-current] { font-weight: 600; color: inherit; text-decoration: none; }
pre { background: #f5f6f8; padding: .7rem; overflow: auto; font-size: 13px; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
table { border-collapse: collapse; display: block; overflow: auto; font-size: 14px; }
td, th { border: 1px solid #d4d7dc; padding: .3rem .5rem; text-align: left; vertical-align: top; }
img { max-width: 100%; }
#found a { margin: .5rem 0; }
#found small { color: #555; display: block; }
@media (max-width: 50rem) { body { display: block; } nav { position: static; height: auto; } }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e4e6ea; }
  nav, pre { background: #202329; }
  a { color: #7db8f5; }
  td, th { border-color: #3c4048; }
  #found small { color: #aaa; }
}
"""
_SEARCH = """
const box = document.querySelector("nav input"), found = document.getElementById("found"), root = document.body.dataset.root;
function score(section, words) {
  let sum = 0;
  for (const word of words) {
    const title = section.title.toLowerCase(), text = section.text.toLowerCase();
    if (title === word) sum += 20; else if (title.includes(word)) sum += 8; else if (text.includes(word)) sum += 1; else return 0;
  }
  return sum;
}
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const hits = words.length ? SECTIONS.map(s => [score(s, words), s]).filter(([n]) => n).sort((a, b) => b[0] - a[0]).slice(0, 20) : [];
  found.replaceChildren(...hits.map(([, section]) => {
    const link = document.createElement("a"), small = document.createElement("small");
    link.href = root + section.place; link.textContent = section.title; small.textContent = section.page; link.append(small);
    return link;
  }));
});
"""


@dataclass(frozen=True)
class Page:
    """A document of the site: its place below the site's root, where its text lies, and what it is made of."""

    place: str
    source: Path
    tokens: list[Token]

    @property
    def title(self) -> str:
        return next((_plain(self.tokens[i + 1]) for i, token in enumerate(self.tokens) if token.type == "heading_open"), self.place)

    def anchors(self) -> set[str]:
        return {str(token.attrs["id"]) for token in self.tokens if token.type == "heading_open"}


def write_site(reference: Path, target: Path) -> list[Page]:
    """Write the site of the documents and of the reference in that folder.

    Raises:
        ValueError: a link leads nowhere.
    """
    pages = [_page("reference/" + path.stem, path) for path in sorted(reference.glob("*.md"))]
    for path in sorted(DOCS.rglob("*.md")):
        if not path.is_relative_to(DOCS / "reference") and not path.is_relative_to(target):
            pages.append(_page("index" if path == DOCS / "README.md" else str(path.relative_to(DOCS).with_suffix("")), path))
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    shutil.copytree(DOCS / "images", target / "images", ignore=shutil.ignore_patterns("*.py"))
    for page in pages:
        file = target / f"{page.place}.html"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_html(page, pages, target))
    sections = [section for page in pages for section in _sections(page)]
    (target / "search.js").write_text(f"const SECTIONS = {json.dumps(sections)};\n{_SEARCH}")
    return pages


def _page(place: str, source: Path) -> Page:
    text = re.sub(r"<!--.*?-->", "", source.read_text(), flags=re.DOTALL)
    tokens = MarkdownIt("commonmark", {"html": False}).enable("table").parse(text)
    for heading, inline in itertools.pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", re.sub(r"[^\w -]", "", _plain(inline).lower()).replace(" ", "-"))
    return Page(place, source, tokens)


def _plain(token: Token) -> str:
    return "".join(child.content for child in token.children or [] if child.type in ("text", "code_inline"))


def _html(page: Page, pages: list[Page], target: Path) -> str:
    root = "../" * page.place.count("/")
    for token in page.tokens:
        for child in token.children or []:
            if child.type == "link_open":
                child.attrSet("href", _link(page, str(child.attrs["href"]), pages, target))
            elif child.type == "image":
                child.attrSet("src", _link(page, str(child.attrs["src"]), pages, target))
    body = MarkdownIt("commonmark", {"html": False}).enable("table").renderer.render(page.tokens, MarkdownIt().options, {})
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(page.title)} - m2flow</title><style>{_STYLE}</style>"
        f'<body data-root="{root}"><nav><input type="search" placeholder="Search" aria-label="Search"><div id="found"></div>'
        f'{"".join(_menu(page, pages, root))}</nav><main>{body}</main><script src="{root}search.js"></script></body></html>\n'
    )


def _menu(page: Page, pages: list[Page], root: str) -> Iterator[str]:
    for folder, heading in GROUPS.items():
        yield f"<h2>{heading}</h2>"
        for other in pages:
            if other.place.rpartition("/")[0] == folder:
                here = ' aria-current="page"' if other is page else ""
                yield f'<a href="{root}{other.place}.html"{here}>{html.escape(other.title)}</a>'


def _link(page: Page, wanted: str, pages: list[Page], target: Path) -> str:
    """The address on the site of what a document links to."""
    if "://" in wanted:
        return wanted
    path, _, anchor = wanted.partition("#")
    file = (page.source.parent / path).resolve() if path else page.source
    found = next((other for other in pages if other.source == file), None)
    is_there = file.exists() if found is None else not anchor or anchor in found.anchors()
    if not is_there:
        raise ValueError(f"{page.source}: the link {wanted} leads nowhere")
    here = (target / page.place).parent
    if found is None:
        return os.path.relpath(target / "images" / file.relative_to(DOCS / "images") if DOCS / "images" in file.parents else file, here)
    return os.path.relpath(target / f"{found.place}.html", here) + (f"#{anchor}" if anchor else "")


def _sections(page: Page) -> Iterator[dict[str, str]]:
    """What the search looks through: each section with its title, place and text."""
    section = {"title": page.title, "page": page.title, "place": f"{page.place}.html", "text": ""}
    for token, before in zip(page.tokens, [None, *page.tokens], strict=False):
        if token.type == "inline" and before is not None and before.type == "heading_open":
            if section["text"]:
                yield section
            title = _plain(token)
            section = {"title": title, "page": page.title, "place": f"{page.place}.html#{before.attrs['id']}", "text": title}
        elif token.type in ("inline", "fence"):
            section["text"] += " " + token.content
    yield section
