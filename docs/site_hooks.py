"""Hooks of MkDocs: pages of the repository's root in the site, and links to files outside of it.

README.md becomes the home page. A link to a file of the repository that is no page becomes plain
text, because the site does not know its address on a code host; a missing file is a warning.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Page of the repository's root -> page of the site."""
LINK = re.compile(r"(?<!\!)\[([^\]\[]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
NOTEBOOK_LINK = re.compile(r'href="([^"#:]+\.(?:md|ipynb))')
IMAGE = re.compile(r"(!\[[^\]]*\]\()docs/")
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root."""
    for source, target in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=content))
    return files


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Rewrite links of notebooks to pages, which MkDocs itself does not see."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def rewrite(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1])
        if target is None:
            log.warning("%s links to %s, which is no page", page.file.src_uri, match[1])
            return match[0]
        return f'href="{target.url_relative_to(page.file)}'

    html = re.sub(r'<a href="runs/[^>]*>(.*?)</a>', r"\1", html)  # files of who ran the notebook
    return NOTEBOOK_LINK.sub(rewrite, html)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links between pages of the root and of docs/, and to files that are no pages."""
    sources = {target: source for source, target in PAGES.items()}
    path = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if not path.startswith("docs/"):
        markdown = IMAGE.sub(r"\1", markdown)

    def rewrite(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if target in PAGES:
            return f"[{text}]({PAGES[target]}{anchor})"
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')}{anchor})"
        if not (ROOT / target).exists():
            log.warning("%s links to %s, which does not exist", path, target)
        return text

    return LINK.sub(rewrite, markdown)
