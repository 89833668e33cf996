"""Hooks of mkdocs: links hold in the repository and on the site, and some files outside docs/ are pages.

In the repository, a page links to the files beside it and to files outside docs/. README.md links with whole
addresses, because it is also shown where the package is published. On the site a link to a page leads to the
page of the site, and a link to any other file of the repository leads to its host.

A link whose text is the name of a page has the title of that page. The button beside commands copies the
commands alone, without what they print. Tables and pictures wider than a telephone scroll in a frame.
"""

from __future__ import annotations

import html
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

BOOST = {
    "start.md": 4,
    "cluster.md": 2,
    "failures.md": 2,
    "forkserver.md": 2,
    "dsl.md": 1.5,
    "dslrun.md": 1.5,
    "compat.md": 0.4,
    "design.md": 0.4,
    "events.md": 0.5,
    "api.md": 0.05,
    "benchmarks-all.md": 0.2,
    "changelog.md": 0.1,
}
"""How much the search prefers a page. Some have every word, and others say what to do."""

LINK = re.compile(
    r"(?P<code>^ *(?P<fence>```|~~~).*?^ *(?P=fence)|`[^`\n]+`)"
    r"|(?P<begin>\]\(|^\[[^\]\n]+\]:[ \t]+)(?P<target>[^)\s]+)",
    re.MULTILINE | re.DOTALL,
)
PAGE_NAME = re.compile(r"\[(?P<name>[\w-]+\.md)\](?=\((?P<target>[\w./-]+\.md)[)#])")
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
CONSOLE = re.compile(r'<div class="language-console highlight"(?=>(?P<code>.*?)</div>)', re.DOTALL)
FRAME = '<div class="wide" tabindex="0"{}>'
READABLE = 11
"""Pixels of the letters in a picture at least."""

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
    if page.file.src_uri in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_uri]}
    source = Path(page.file.abs_src_path or "")
    repository = (config.repo_url or "").rstrip("/")

    def link(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        return found["begin"] + site_link(source, found["target"], repository)

    def titled(found: re.Match[str]) -> str:
        return f"[{title_of(source.parent / found['target'])}]"

    def picture(found: re.Match[str]) -> str:
        place = Path(found["light"].partition("/raw/main/")[2] or f"docs/{found['light']}")
        style = f'{{ style="min-width: {least_width(ROOT / place)}px" }}'
        images = (
            f"![{found['words']}]({found[scheme]}#only-{scheme}){style}" for scheme in ("light", "dark")
        )
        return f"{FRAME.format(' markdown')}\n\n{' '.join(images)}\n\n</div>"

    return LINK.sub(link, PICTURE.sub(picture, PAGE_NAME.sub(titled, markdown)))


def title_of(page: Path) -> str:
    """The title of a page; its name if it has none."""
    found = TITLE.search(page.read_text(encoding="utf-8")) if page.exists() else None
    return found[1] if found else page.name


def least_width(picture: Path) -> int:
    """Pixels that a drawing needs so that its text can be read."""
    drawn = picture.read_text(encoding="utf-8")
    width = float(re.findall(r'viewBox="[\d.]+ [\d.]+ ([\d.]+) ', drawn)[0])
    sizes = [float(size) for size in re.findall(r"font-size: ?([\d.]+)", drawn)]
    return round(width * READABLE / max(set(sizes), key=sizes.count))


def on_page_content(content: str, **_: object) -> str:
    """Tables in a frame that scrolls, and that the keyboard reaches; commands that can be copied."""
    framed = content.replace("<table>", f"{FRAME.format('')}<table>").replace("</table>", "</table></div>")
    return CONSOLE.sub(copied, framed)


def copied(block: re.Match[str]) -> str:
    """The begin of a block of a console, with what its button copies."""
    lines = html.unescape(re.sub(r"<[^>]+>", "", block["code"])).splitlines()
    return f'{block[0]} data-copy="{html.escape(commands(lines))}"'


def commands(console: list[str]) -> str:
    """The commands of a console, without the prompt and without what they print."""
    found: list[str] = []
    for line in console:
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found.append(line)
    return "\n".join(found)


def on_post_page(output: str, config: MkDocsConfig, **_: object) -> str:
    """The theme's page, with the version and a name of its search, and without figures of the host."""
    name = f'<span class="md-ellipsis">\n            {config.site_name}\n'
    output = output.replace(name, f'{name}            <span class="version">{version()}</span>\n', 1)
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    return output.replace('data-md-component="source"', "")


def version() -> str:
    """The version that the pages describe."""
    text = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    assert found is not None
    return found[1]


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
