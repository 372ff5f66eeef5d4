"""The page in a real browser: search, history, recommendations, reasons; keyboard, phone, dark mode."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from dpformer.models.counts import TransitionCounts
from dpformer.runs.model_file import Release
from dpformer.serving.access import Access
from dpformer.serving.served import Served
from tests.browser import chromium
from tests.models.test_backoff import facts, released
from tests.serving.server import Server, serving
from tests.tiny_runs import EVIL, tiny_run
from tests.training.memo import accountant_remembers  # noqa: F401

# So few users say nothing at an ε that protects them: the page needs a model that has learned something.
COUNTS: dict[str, Any] = {
    "model": "counts",
    "epsilon": 60.0,
    **dict.fromkeys(("batch_size", "epochs", "dim", "blocks")),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Served.open(tiny_run(tmp_path_factory, **COUNTS))) as found:
        yield found


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    with opened(browser, server) as found:
        yield found


class opened:
    """A page of the server that has its first answer; it must make no error and ask nobody else."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.context, self.server = browser.new_context(**options), server
        self.errors: list[str] = []

    def __enter__(self) -> Any:
        page = self.context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        own = self.server.url
        page.on("request", lambda asked: asked.url.startswith(("data:", own)) or self.errors.append(asked.url))
        page.goto(own)
        page.wait_for_selector("#next[aria-busy=false] .take")
        return page

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert not self.errors


def until(page: Any, condition: str) -> None:
    """Waits for an expression to be true; the page's own policy forbids the driver's way, which needs eval."""
    for _ in range(1200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {condition}")


def recommended(page: Any) -> list[str]:
    page.wait_for_selector("#next[aria-busy=false]")
    return list(page.locator("#next .take").all_inner_texts())


def add(page: Any, text: str) -> None:
    page.fill("#search", text)
    page.wait_for_selector("#found [role=option]")
    page.locator("#found [role=option]").first.click()


def test_a_history_is_built_by_clicking_and_answers_change(page: Any, server: Server) -> None:
    popular = recommended(page)
    assert len(popular) == 10 and page.is_visible("#empty") and not page.locator(".why").count()
    add(page, "title 7")
    page.wait_for_selector(".because")
    after = recommended(page)
    expected = server.post("/recommend", history=["i7"])["recommendations"]
    assert after == [entry["title"] for entry in expected] != popular
    page.locator(".take").first.click()  # a recommendation becomes part of the history
    until(page, "document.querySelectorAll('#history li').length === 2")
    assert page.locator("#history .name").all_inner_texts() == [after[0], "Title 7"]
    page.locator("#history .remove").first.click()
    until(page, "document.querySelectorAll('#history li').length === 1")
    assert recommended(page) == after
    page.click("#undo")
    until(page, "document.querySelectorAll('#history li').length === 2")
    page.click("#clear")
    page.wait_for_selector("#empty", state="visible")
    until(page, "!document.querySelector('.why')")
    assert recommended(page) == popular


def test_why(page: Any, server: Server) -> None:
    for text in ("title 7", "title 8"):
        add(page, text)
    until(page, "document.querySelectorAll('#history li').length === 2")
    until(page, "document.querySelector('#status').textContent.includes('history of 2')")
    why = page.locator(".why").first
    why.click()
    assert why.get_attribute("aria-expanded") == "true"
    rows = page.locator("#next > li").first.locator(".reasons li")
    shown = dict(zip(rows.locator(".of").all_inner_texts(), rows.locator(".amount-of").all_inner_texts(), strict=True))
    entry = server.post("/recommend", history=["i7", "i8"], why=True)["recommendations"][0]
    for part in entry["why"]:
        share = part["contribution"]
        assert shown[part["title"]] == ("<1%" if 0 < share < 0.005 else f"{100 * share + 1e-9:.0f}%")
    assert set(shown) == {"Title 7", "Title 8", "its popularity"}


def test_by_keyboard_alone(page: Any) -> None:
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"
    page.keyboard.type("title 1")
    options = "[...document.querySelectorAll('#found [role=option]')]"
    until(
        page, f"{options}.length > 1 && {options}.every((one) => one.innerText.includes('Title 1'))"
    )  # of all letters
    names = page.locator("#found [role=option]").all_inner_texts()
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#search", "aria-activedescendant") == "found-1"
    page.keyboard.press("Enter")
    page.wait_for_selector(".because")
    assert page.locator("#history .name").all_inner_texts() == [names[1]]
    page.keyboard.type("title")
    page.wait_for_selector("#found [role=option]")
    page.keyboard.press("Escape")
    assert page.is_hidden("#found") and page.input_value("#search") == ""
    for _ in range(4):  # to the first recommendation: remove, undo, then it
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.className") == "take":
            break
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('#history li').length === 2")


def test_titles_are_text_and_never_code(page: Any) -> None:
    page.evaluate("() => { window.alert = () => { window.attacked = true } }")
    add(page, "script")
    page.wait_for_selector(".because")
    assert page.locator("#history .name").all_inner_texts() == [EVIL]
    assert page.evaluate("window.attacked") is None


def test_privacy_facts(page: Any, server: Server) -> None:
    facts = server.get("/statement")
    until(page, "document.querySelector('#epsilon').textContent !== '…'")
    assert 0 <= float(page.inner_text("#epsilon")) - facts["epsilon"] < 0.001
    assert page.inner_text("#delta") == "1 in 600" and "one user" in page.inner_text("#protects")
    assert page.is_hidden("#not-private")
    page.locator("summary").first.click()
    assert facts["words"][0] in page.inner_text("#words")


def test_a_run_that_is_not_private_says_so(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        serving(Served.open(tiny_run(tmp_path_factory, seed=1, **COUNTS))) as server,
        opened(browser, server) as page,
    ):
        page.wait_for_selector("#not-private", state="visible")
        assert "NOT PRIVATE" in page.inner_text("#not-private") and page.inner_text("#protects") == "no one"


def test_phone_and_dark_mode(browser: Any, server: Server) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}
    with opened(browser, server, **phone) as page:
        add(page, "title 7")
        page.wait_for_selector(".because")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360  # nothing sticks out
        red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert max(red, green, blue) < 60
        box = page.locator("#history .remove").first.bounding_box()
        assert box["width"] >= 32 and box["height"] >= 32


def test_a_server_that_is_gone_is_said(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(Served.open(tiny_run(tmp_path_factory, **COUNTS))) as server:
        view = opened(browser, server)
        page = view.__enter__()
    page.locator(".take").first.click()
    until(page, "document.querySelector('#status').textContent.startsWith('No answer')")
    view.context.close()


def test_the_attribute_behind_a_recommendation_is_named(browser: Any) -> None:
    model = TransitionCounts.from_release(released(8.0), facts())
    titles = [f"Title {item}" for item in range(model.num_items)]
    release = Release(model, [f"i{item}" for item in range(model.num_items)], titles, {}, model.popularity.numpy())
    known = {"headline": "A model with attributes.", "private": True, "epsilon": 4.0, "delta": 1e-4}
    with serving(Served(release, known)) as server, opened(browser, server) as page:
        add(page, "title 12")
        page.wait_for_selector(".because")
        found = server.post("/recommend", history=["i12"], why=True)["recommendations"]
        place, name = next((n, e["why"][0]["attribute"]) for n, e in enumerate(found) if e["why"][0]["attribute"])
        row = page.locator("#next > li").nth(place)
        assert f"after Title 12 ({name})" in row.locator(".because").inner_text()
        row.locator(".why").click()
        assert row.locator(".reasons .attribute").first.inner_text() == f"both {name}"


def test_a_token_is_asked_for(browser: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-this-test")
    served = Served.open(tiny_run(tmp_path_factory, **COUNTS))
    with serving(served, access=Access.of(token_file=tokens)) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(server.url)
        page.wait_for_selector("#locked:not([hidden])")
        page.fill("#token", "a-token-of-this-test")
        page.keyboard.press("Enter")
        page.wait_for_selector("#next[aria-busy=false] .take")
        assert page.locator("#locked").is_hidden()
        context.close()
