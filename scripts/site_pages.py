"""Hooks of mkdocs: links hold in the repository and on the site, and some files outside docs/ are pages.

In the repository, a page links to the files beside it and to files outside docs/. README.md links with whole
addresses, because it is also shown where the package is published. On the site a link to a page leads to the
page of the site, and a link to any other file of the repository leads to its host.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
"""Files outside docs/ that are pages, and their names on the site."""

LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```|~~~).*?^ *(?P=fence)|`[^`\n]+`)"
    r"|(?P<begin>\]\(|^\[[^\]\n]+\]:[ \t]+)(?P<target>[^)\s]+)",
    re.MULTILINE | re.DOTALL,
)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'\s*<img alt="(?P<words>[^"]+)" src="(?P<light>[^"]+)"[^>]*>\s*</picture>'
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """The text of a page with the links of the site, and with pictures that follow its switch of colours."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # the bar above has it
    if page.file.src_uri == "changelog.md":
        page.meta["search"] = {"boost": 0.1}  # it has every word
    source = Path(page.file.abs_src_path or "")
    repository = (config.repo_url or "").rstrip("/")

    def link(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        return found["begin"] + site_link(source, found["target"], repository)

    both = r"![\g<words>](\g<light>#only-light) ![\g<words>](\g<dark>#only-dark)"
    return LINK.sub(link, PICTURE.sub(both, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Tables in a frame that scrolls, and that the keyboard reaches."""
    frame = '<div class="wide" tabindex="0">'
    return html.replace("<table>", f"{frame}<table>").replace("</table>", "</table></div>")


def on_post_page(output: str, **_: object) -> str:
    """The theme's page, but its search has a name, and it asks the repository's host for no figures."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace('data-md-component="source"', "")


def site_link(source: Path, target: str, repository: str) -> str:
    """The target of a link in a file of the repository, as a page at the top of the site links to it."""
    name, mark, anchor = target.partition("#")
    for prefix in (f"{repository}/blob/main/", f"{repository}/raw/main/"):
        if name.startswith(prefix):
            file = ROOT / name.removeprefix(prefix)
            break
    else:
        if not name or re.match(r"[a-z][a-z0-9+.-]*:", name):
            return target
        file = source.parent / name
    path = os.path.relpath(file.resolve(), ROOT)
    if path in OUTSIDE:
        path = OUTSIDE[path]
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    else:
        path = f"{repository}/blob/main/{path}"
    return path + mark + anchor
