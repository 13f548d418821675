"""`ckpt show --html` and `ckpt diff --html`: what pages say, that they are harmless, and that a browser draws them."""

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ckpt
from ckpt.inspect.pages.heatmap import kind_and_layer, shade
from ckpt.inspect.pages.treemap import squarify
from tests.cli.commands import document, run
from tests.support.ranks import Crew

EVIL = "<script>alert(1)</script>"
BELL = "bell\x1b[31m\n\u202e\"' onload=x"
VOID = {"meta", "link", "br"}
FETCHING = {"src", "href", "xlink:href", "action", "data", "srcset", "poster", "background", "formaction"}


class Page(HTMLParser):
    """A page as a parser sees it: elements with attributes, and text. Fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.open = "", list[str]()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def classes(self, tag: str) -> list[str]:
        return [attrs.get("class") or "" for name, attrs in self.elements if name == tag]


def harmless(text: str) -> Page:
    """The page, after a look for anything that is fetched or executed."""
    page = Page(text)
    for tag, attrs in page.elements:
        assert tag not in {"script", "iframe", "object", "embed", "img", "base", "form", "foreignobject"}
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
        fetched = {attrs[name] for name in FETCHING & attrs.keys()}
        assert fetched <= {"data:,"}, (tag, attrs)
    assert not re.search(r"url\(|@import", text)
    assert not any(not c.isprintable() and c != "\n" for c in text)
    return page


def states() -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    layers = {f"layers.{i}.mlp.weight": torch.randn(200, 130, generator=generator) for i in range(6)}
    norms = {f"layers.{i}.norm.weight": torch.ones(50) for i in range(6)}
    a = {"model": {**layers, **norms, EVIL: torch.ones(3), BELL: torch.ones(40_000)}, "lr": 0.1, "note": f"{EVIL}&"}
    a |= {"embed": torch.zeros(2600, 1000), "shape": torch.ones(4), "gone": torch.ones(2)}
    b = {**a, "model": dict(a["model"]), "lr": 0.2, "note": "new", "shape": torch.ones(5), "new": torch.ones(1)}
    del b["gone"]
    for layer in (4, 5):
        w = a["model"][f"layers.{layer}.mlp.weight"].clone()
        w[3, 7:9] += 1
        b["model"][f"layers.{layer}.mlp.weight"] = w
    b["model"][EVIL] = torch.tensor([1.0, 2.0, 1.0])
    return a, b


class Pages:
    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        with ckpt.Checkpointer(self.run) as ck:
            for step, state in enumerate(states(), 1):
                ck.save(step, state)
        self.show, self.diff = folder / "show.html", folder / "diff.html"
        done = run("show", f"{self.run}@1", "--html", self.show)
        assert (done.exit_code, done.output) == (0, "")
        done = run("diff", f"{self.run}@1", f"{self.run}@2", "--html", self.diff)
        assert (done.exit_code, done.output) == (1, "")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"))


def spelt(name: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def test_show_says_what_json_says(pages: Pages) -> None:
    page = harmless(pages.show.read_text())
    found = document("show", f"{pages.run}@1")
    titles = [attrs.get("title") or "" for _, attrs in page.elements]
    for one in found["tensors"]:
        assert spelt(f"{one['name']}, fingerprint {one['fingerprint']}") in titles
    for fact in (found["state_id"], found["attempt"], found["url"], "2600x1000", "650x500", "lr", "0.1", EVIL + "&"):
        assert fact in page.text, fact
    assert sorted(set(page.classes("svg"))) == ["chunks", "layout", "treemap"]
    assert "object 1/0: elements [1300:2600, 0:500] in 2 chunks" in page.text
    assert "rank 0 holds [0:2600, 0:1000], 9.9 MiB" in page.text
    assert "embed: 9.9 MiB" in page.text  # of the treemap


def test_diff_says_what_json_says(pages: Pages) -> None:
    page = harmless(pages.diff.read_text())
    found = document("diff", f"{pages.run}@1", f"{pages.run}@2", code=1)
    assert len(found["differences"]) == 3
    for d in found["differences"]:
        first = d["first"]
        for fact in (d["name"], f"[{', '.join(map(str, first['index']))}]", str(first["ulp"]), str(d["max_ulp"])):
            assert spelt(fact) in page.text, fact
        for side in (first["a"], first["b"]):
            assert side["value"] in page.text and f"0x{side['bits']}" in page.text
    for fact in (
        found["a"]["state_id"],
        found["b"]["state_id"],
        "float32 5",
        "gone",
        "new",
        "0.2",
        "The states differ",
    ):
        assert fact in page.text, fact
    said = [f"model/layers.{n}.mlp.weight: 2 of 26,000 elements differ (0.00769 %)" for n in (4, 5)]
    said += [f"model/layers.{n}.mlp.weight: equal" for n in range(4)]
    assert [line for line in said if line not in page.text] == []
    heat = [attrs for tag, attrs in page.elements if tag == "rect"]
    looks = [attrs["class"] for attrs in heat]
    assert looks.count("s3") == 2 and looks.count("s0") == 4 and looks.count("s7") == 1 and looks.count("other") == 3
    assert "model/layers.*.mlp.weight" in page.text and "norm" not in page.text


def test_the_same_and_brief(pages: Pages, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run("diff", f"{pages.run}@1", f"{pages.run}@1", "--html", page).exit_code == 0
    same = harmless(page.read_text())
    assert "The same state" in same.text and "svg" not in [tag for tag, _ in same.elements]
    done = run("diff", f"{pages.run}@1", f"{pages.run}@2", "--brief", "--html", page)
    brief = harmless(page.read_text())
    assert done.exit_code == 1 and "model/layers.4.mlp.weight: differs, not read" in brief.text
    assert [attrs.get("class") for tag, attrs in brief.elements if tag == "rect"].count("unread") == 3


def test_json_beside_the_page_and_a_choice_of_tensors(pages: Pages, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    found = document("show", f"{pages.run}@1", "--tensors", "model/layers.1.*", "--html", page)
    text = harmless(page.read_text()).text
    assert len(found["tensors"]) == 2 and "layers.1.norm.weight" in text and "layers.2.norm.weight" not in text


def test_a_page_that_cannot_be_written(pages: Pages, tmp_path: Path) -> None:
    done = run("show", pages.run, "--html", tmp_path / "no" / "page.html")
    assert done.exit_code == 2 and "is no directory that can be written" in done.stderr
    assert run("show", pages.run, "--html", tmp_path).exit_code == 2


def test_a_copy_says_that_it_has_no_receipts(pages: Pages, tmp_path: Path) -> None:
    assert run("cp", f"{pages.run}@1", tmp_path / "copy").exit_code == 0
    assert run("show", tmp_path / "copy", "--html", tmp_path / "page.html").exit_code == 0
    page = harmless((tmp_path / "page.html").read_text())
    assert "This checkpoint is a copy." in page.text and "layout" not in page.classes("svg")


def test_a_receipt_of_another_rank_is_refused(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, {"w": torch.ones(4)})
    receipt = next((tmp_path / "run").rglob("receipts/000000.json"))
    receipt.write_bytes(receipt.read_bytes().replace(b'"rank":0', b'"rank":1'))
    done = run("show", tmp_path / "run", "--html", tmp_path / "page.html")
    assert done.exit_code == 1 and "not the receipt of rank 0" in done.stderr
    assert not (tmp_path / "page.html").exists()


def test_thousands_of_tensors(tmp_path: Path) -> None:
    """Pictures stay few and tables closed; every name is there."""
    parts = [("attn", 4), ("mlp", 5), ("norm", 6)]
    state = {f"layers.{i}.{p}.{n}": torch.ones(n) for i in range(300) for p, n in parts for n in (n, n + 9, n + 20)}
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        ck.save(1, {"model": state})
        ck.save(2, {"model": {name: t + 1 for name, t in state.items()}})
    show, diff = tmp_path / "show.html", tmp_path / "diff.html"
    assert run("show", f"{tmp_path}/run@1", "--html", show).exit_code == 0
    assert run("diff", f"{tmp_path}/run@1", f"{tmp_path}/run@2", "--html", diff).exit_code == 1
    for page in (harmless(show.read_text()), harmless(diff.read_text())):
        assert all(name.removeprefix("model/") in page.text for name in state)
        assert sum(tag == "rect" for tag, _ in page.elements) < 1500
        large = [attrs for tag, attrs in page.elements if tag == "details" and "open" in attrs]
        assert len(large) < 3
    assert "3 layers share a column" in Page(diff.read_text()).text
    assert show.stat().st_size < 4 << 20


def _save(rank: int, world: int, root: str) -> None:
    with ckpt.Checkpointer(root, layout=ckpt.Layout(pp=2)) as ck:
        w = ckpt.ShardedTensor(
            torch.full((2, 100, 300), float(rank)), [((2 * rank, 0, 0), (2, 100, 300), (0, 0, 0))], (4, 100, 300)
        )
        ck.save(1, {"w": w, "shared": ckpt.replicated(torch.ones(9))})


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as made:
        yield made


@pytest.mark.ranks
def test_which_rank_holds_which_box(crew: Crew, tmp_path: Path) -> None:
    crew.run(_save, str(tmp_path / "run"))
    assert run("show", tmp_path / "run", "--html", tmp_path / "page.html").exit_code == 0
    text = harmless((tmp_path / "page.html").read_text()).text
    for said in (
        "rank 0 holds [0:2, 0:100, 0:300], 234.4 KiB; alike in the others of 2 slices",
        "rank 1 holds [2:4, 0:100, 0:300], 234.4 KiB",
        "[2:4], 2 alike",
        "ranks 0, 1 hold [0:9], 36 B",
        "pp1",
    ):
        assert said in text, said


def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no Chromium is installed here (Debian: apt-get install chromium), so no page was drawn")


def load(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """Standard output of a browser that loads a page, and what it wrote to its console."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--window-size=1180,2000", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_in_a_browser(pages: Pages, tmp_path: Path) -> None:
    wanted = {pages.show: {"treemap", "layout", "chunks"}, pages.diff: {"heat"}}
    for page, kinds in wanted.items():
        for light in ("--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"):
            shot = tmp_path / "shot.png"
            shot.unlink(missing_ok=True)
            _, console = load(page, tmp_path / "profile", f"--screenshot={shot}", light)
            assert console == [] and shot.read_bytes().startswith(b"\x89PNG") and shot.stat().st_size > 20_000
        dom, console = load(page, tmp_path / "profile", "--dump-dom")
        assert console == []
        drawn = harmless(dom)
        assert set(drawn.classes("svg")) == kinds
        assert all(a["role"] == "img" and a["aria-label"] for tag, a in drawn.elements if tag == "svg")
    broken = tmp_path / "broken.html"
    broken.write_text(pages.diff.read_text().replace("<main>", "<main><script>alert(1)</script>"))
    _, console = load(broken, tmp_path / "profile", "--dump-dom")
    assert any("Content Security Policy" in line for line in console)  # the console is seen, and no script would run


def test_layers_of_a_stacked_tensor(tmp_path: Path) -> None:
    """Counted by slice while tensors are read: of a packed one, and of one that is read object by object."""
    generator = torch.Generator().manual_seed(1)
    states = []
    base = {"small": torch.randn(5, 7, 3, generator=generator), "large": torch.randn(4, 1100, 700, generator=generator)}
    other = {name: t.clone() for name, t in base.items()}
    other["small"][1, 2:4] += 1
    other["small"][4, 6, 2] += 1
    other["large"][2, 10:1090, 690] += 1
    other["large"][3, 0, 0] += 1
    with ckpt.Checkpointer(tmp_path / "run") as ck:
        for step, state in enumerate((base, other), 1):
            states.append(
                {n: ckpt.ShardedTensor(t, [((0,) * 3, t.shape, (0,) * 3)], t.shape, stack=1) for n, t in state.items()}
            )
            ck.save(step, states[-1])
    found = document("diff", f"{tmp_path}/run@1", f"{tmp_path}/run@2", "--html", tmp_path / "page.html", code=1)
    expected = {n: [int((x != y).sum()) for x, y in zip(base[n], other[n], strict=True)] for n in base}
    assert {d["name"]: d["slices"] for d in found["differences"]} == expected
    assert expected == {"small": [0, 6, 0, 0, 1], "large": [0, 0, 1080, 1]}
    text = harmless((tmp_path / "page.html").read_text()).text
    assert "small[1]: 6 of 21 elements differ (28.6 %)" in text and "large[2]: 1,080 of 770,000" in text


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=60), st.floats(1, 2000), st.floats(1, 2000))
def test_areas_of_the_treemap(sizes: list[int], width: float, height: float) -> None:
    """In proportion, inside, and apart from each other."""
    sizes.sort(reverse=True)
    areas = squarify(sizes, (3.0, 5.0, width, height))
    for size, (x, y, w, h) in zip(sizes, areas, strict=True):
        assert abs(w * h - size / sum(sizes) * width * height) <= 1e-6 * width * height
        assert x >= 3 - 1e-6 and y >= 5 - 1e-6 and x + w <= 3 + width + 1e-6 and y + h <= 5 + height + 1e-6
    for a, b in itertools.combinations(areas, 2):
        across = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
        down = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
        assert across <= 1e-6 or down <= 1e-6


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model/layers.12.mlp.weight", "model/layers.*.mlp.weight", 12),
        ("opt/exp_avg/layers/3/experts/7/w", "opt/exp_avg/layers/*/experts/7/w", 3),
        ("list/~4", "list/*", 4),
        ("fc1.weight", "fc1.weight", None),
        ("7", "*", 7),
        ("a/12345678901234567890/b", "a/12345678901234567890/b", None),
    ],
)
def test_kinds_and_layers(name: str, kind: str, layer: int | None) -> None:
    assert kind_and_layer(name) == (kind, layer)


def test_shades() -> None:
    assert [shade(n, 10**7) for n in (0, 1, 10, 11, 100, 10**5, 10**6, 10**6 + 1, 10**7)] == [0, 1, 1, 2, 2, 5, 6, 7, 7]
