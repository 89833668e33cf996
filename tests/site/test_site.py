"""The site as its readers get it: built from the documents, and read in a browser on a wide and on a narrow screen."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.metadata
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

axe = pytest.importorskip("axe_playwright_python.sync_playwright")
playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).resolve().parents[2]
WIDE, NARROW = ({"width": 1280, "height": 800}, {"width": 390, "height": 844})

# The colours and the frame are the same on all of a page: the begin of a long list, table or text stands for its rest.
SHORTEN = """document.querySelectorAll(
    ".md-content tr:nth-child(n+4), .md-nav__item:nth-child(n+8), .md-content__inner > :nth-child(n+30)"
).forEach(element => element.remove())"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def pages(site: Path) -> list[str]:
    """Paths of all pages, as their addresses have them."""
    found = [file.parent.relative_to(site).as_posix() for file in sorted(site.rglob("index.html"))]
    return ["" if page == "." else f"{page}/" for page in found]


class Links(HTMLParser):
    """What a page links to and loads, and the names that others can link to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.followed: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.names.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.followed.append(values["href"])
        elif tag == "link" and values.get("rel") not in {"canonical", "prev", "next"}:
            self.loaded.append(values["href"])
        elif "src" in values:
            self.loaded.append(values["src"])


def test_every_link_inside_the_site_leads_to_a_page_and_to_a_heading(site: Path, pages: list[str]) -> None:
    links = {f"/{page}": Links(site / page / "index.html") for page in pages}
    broken = []
    for page, found in links.items():
        for target in found.followed + found.loaded:
            address = urlsplit(urljoin(page, target))
            if address.scheme:
                continue
            path = unquote(address.path)
            file = site / path.lstrip("/")
            there = file.is_file() or (file / "index.html").is_file()
            named = (
                not address.fragment or path not in links or unquote(address.fragment) in links[path].names
            )
            if not (there and named):
                broken.append(f"{page} links to {target}")
    assert not broken


def test_pages_load_nothing_from_other_hosts(site: Path, pages: list[str]) -> None:
    loaded = {target for page in pages for target in Links(site / page / "index.html").loaded}
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    loaded.update(re.findall(r"url\([\"']?([^\"')]+)", styles))
    loaded.update(re.findall(r"@import[^;]*", styles))
    assert not [
        target for target in loaded if urlsplit(target).scheme not in {"", "data"} or "//" in target[:2]
    ]


def test_links_to_documents_of_the_repository_lead_to_their_pages(site: Path, pages: list[str]) -> None:
    followed = {target for page in pages for target in Links(site / page / "index.html").followed}
    assert not [one for one in followed if re.search(r"/(blob|raw)/main/(docs/|README|CHANGELOG)", one)]


def test_the_first_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 170


def test_a_link_has_a_title_and_not_the_name_of_a_file(site: Path, pages: list[str]) -> None:
    named = [
        f"{page}: {found}"
        for page in pages
        for found in re.findall(
            r">([\w-]+\.md)</a>", (site / page / "index.html").read_text(encoding="utf-8")
        )
    ]
    assert named == []


def test_every_page_shows_the_version_in_its_header(site: Path, pages: list[str]) -> None:
    shown = f'<span class="version">{importlib.metadata.version("dsl")}</span>'
    assert [
        page for page in pages if shown not in (site / page / "index.html").read_text(encoding="utf-8")
    ] == []


def test_diagrams_are_drawn_from_the_text_beside_them(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "pictures.py", "--diagrams", tmp_path], check=True)
    names = [file.name for file in tmp_path.iterdir()]
    same, _, _ = filecmp.cmpfiles(tmp_path, ROOT / "docs" / "pictures", names, shallow=False)
    assert len(names) == 6
    assert same == names, "run `make pictures`"


def test_pictures_name_no_path_of_the_machine_that_drew_them() -> None:
    pictures = (ROOT / "docs" / "pictures").glob("*.svg")
    paths = re.compile(r"/(tmp|root|home)/")
    assert not [file.name for file in pictures if paths.search(file.read_text(encoding="utf-8"))]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Where the site is served."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser without a window."""
    names = ("chromium-headless-shell", "chromium", "google-chrome")
    program = next((path for path in map(shutil.which, names) if path), None)
    if program is None:
        pytest.skip("needs Chromium, which the set-up installs as root on Debian")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def read(browser: Any, address: str) -> Iterator[Callable[..., Any]]:
    """Opens an empty tab that reads the site, with settings of its own; the test ends it."""
    contexts = []

    def tab(**settings: object) -> Any:
        contexts.append(browser.new_context(base_url=address, **settings))
        return contexts[-1].new_page()

    yield tab
    for context in contexts:
        context.close()


def sideways(tab: Any) -> int:
    """How many pixels of the page lie beside the screen."""
    return int(tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.mark.parametrize("screen, colours", [(WIDE, "light"), (NARROW, "dark")])
@pytest.mark.timeout(180)
def test_every_page_fits_the_screen_and_has_no_errors(
    read: Callable[..., Any], pages: list[str], address: str, screen: dict[str, int], colours: str
) -> None:
    tab = read(viewport=screen, color_scheme=colours)
    troubles: list[str] = []
    tab.on("console", lambda message: troubles.append(f"{tab.url}: {message.type}: {message.text}"))
    tab.on("pageerror", lambda error: troubles.append(f"{tab.url}: {error}"))
    tab.on(
        "request", lambda one: troubles.extend([] if one.url.startswith((address, "data:")) else [one.url])
    )
    half = 0 if colours == "light" else 1
    for number, page in enumerate(pages):
        tab.goto(page)
        if sideways(tab):
            troubles.append(f"{tab.url} is {sideways(tab)} pixels wider than the screen")
        if number % 2 == half:
            # What surrounds the text is the same on all pages.
            part = "html" if number == half else ".md-content"
            troubles += [f"{tab.url}: {fault}" for fault in serious(tab, part)]
    assert not troubles


def serious(tab: Any, part: str) -> list[str]:
    """What keeps some readers from reading a part of the page, as axe judges it."""
    tab.evaluate(SHORTEN)
    found = axe.Axe().run(tab, part).response["violations"]
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]}"
        for fault in found
        if fault["impact"] in {"serious", "critical"}
    ]


@pytest.mark.parametrize("screen", [WIDE, NARROW])
def test_the_search_finds_what_to_do_about_a_hang(read: Callable[..., Any], screen: dict[str, int]) -> None:
    tab = read(viewport=screen)
    tab.goto("")
    if screen is NARROW:
        tab.locator("label[for=__search]").first.click()
    tab.get_by_role("textbox", name="Search").press_sequentially("hang")
    tab.locator(".md-search-result__link").first.wait_for()
    first = tab.locator(".md-search-result__item").first
    assert "hang" in first.inner_text().lower()
    assert "changelog" not in first.locator("a").first.get_attribute("href")


TASKS = {
    "first job": "start",
    "several hosts": "cluster",
    "slurm": "slurm",
    "logs of one rank": "output",
    "restart": "failures",
    "binding": "binding",
    "elastic": "elastic",
    "notebook": "notebook",
    "debugger": "debugging",
    "CUDA_VISIBLE_DEVICES": "dsl",
    "kubernetes": "kubernetes",
    "uninstall": "install",
    "conda": "install",
    "docker": "containers",
    "mpirun": "from-mpirun",
    "exit code": "failures",
    "start faster": "forkserver",
    "prometheus": "metrics",
    "slow rank": "tools",
    "tune": "autotuning",
}
"""What people look for, and the page that has it."""


@pytest.mark.timeout(180)
def test_the_search_finds_the_page_of_a_task(read: Callable[..., Any], address: str) -> None:
    tab = read(viewport=WIDE)
    missed = {}
    for words, page in TASKS.items():
        tab.goto("")
        tab.get_by_role("textbox", name="Search").press_sequentially(words)
        links = tab.locator(".md-search-result__item > a")
        wanted = tab.locator(f".md-search-result__item > a[href^='{address}{page}/']").first
        with contextlib.suppress(playwright.TimeoutError):
            wanted.wait_for(state="attached", timeout=5000)
        found = links.evaluate_all("found => found.slice(0, 3).map(one => one.pathname.split('/')[1])")
        if page not in found:
            missed[words] = found
    assert missed == {}


def test_a_button_switches_to_dark_colours_which_stay(read: Callable[..., Any]) -> None:
    tab = read(viewport=WIDE, color_scheme="light")
    tab.goto("")
    background = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(background)
    tab.get_by_title("Dark colours").click()
    tab.wait_for_function(f"{background} !== '{light}'")
    tab.goto("cli/")
    assert tab.evaluate(background) != light


def test_pages_can_be_read_without_javascript(read: Callable[..., Any], pages: list[str]) -> None:
    tab = read(viewport=NARROW, java_script_enabled=False)
    for page in pages:
        tab.goto(page)
        assert tab.locator(".md-content h1").first.is_visible(), page
        last = tab.locator(".md-content__inner > *:not(form, .md-source-file)").last
        last.scroll_into_view_if_needed()
        assert last.is_visible(), page
        assert sideways(tab) == 0, page


def test_a_console_copies_its_commands_alone(read: Callable[..., Any]) -> None:
    tab = read(viewport=WIDE, permissions=["clipboard-read", "clipboard-write"])
    tab.goto("start/")
    block = tab.locator(".language-console").filter(has_text="echo $?")
    block.hover()
    block.locator("[data-clipboard-target]").click()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == "dslrun --nproc-per-node 2 train.py --fail\necho $?"


def test_tables_are_as_large_as_text(read: Callable[..., Any]) -> None:
    tab = read(viewport=NARROW)
    tab.goto("dsl/")
    size = "one => getComputedStyle(one).fontSize"
    assert tab.locator("td").first.evaluate(size) == tab.locator(".md-content p").first.evaluate(size)


LETTERS = """pictures => Promise.all(pictures.map(async picture => {
    const drawn = await (await fetch(picture.src)).text();
    const sizes = [...drawn.matchAll(/font-size[:=] ?"?([0-9.]+)/g)].map(found => Number(found[1]));
    const width = Number(drawn.match(/viewBox="[0-9.]+ [0-9.]+ ([0-9.]+)/)[1]);
    return [picture.src, Math.min(...sizes) * picture.getBoundingClientRect().width / width];
}))"""
"""How high the smallest letters of each picture are on the screen."""


@pytest.mark.timeout(180)
def test_pictures_can_be_read_on_a_telephone(read: Callable[..., Any], pages: list[str]) -> None:
    tab = read(viewport=NARROW)
    seen, small = set(), []
    for page in pages:
        tab.goto(page)
        pictures = tab.locator(".md-content img").filter(visible=True)
        for source, pixels in pictures.evaluate_all(LETTERS):
            seen.add(source)
            small += [f"{source}: {pixels:.1f}"] if pixels < 8.5 else []
    assert len(seen) >= 8
    assert small == []
