"""The page of a plan: its structure, and that what it shows is what it was given."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from moesaic.cli.main import main
from moesaic.cost.memory import stage_memory
from moesaic.cost.rates import Stack
from moesaic.cost.workload import OVERLAP, Columns, Workload
from moesaic.plan import result as terminal
from moesaic.plan.price import Pricer
from moesaic.plan.result import MEMORY_PARTS, TIME_PARTS, PlanResult
from moesaic.plan.steps import step_picture
from moesaic.report.plan_charts import MOST_SQUARES, meshes, nodes_spanned
from moesaic.report.plan_page import MEMORY_NAMES, TIME_NAMES, PlanFacts, degrees_text, options_text, plan_page
from moesaic.spec.cluster import load_cluster
from moesaic.spec.families import load_model_spec
from moesaic.spec.layout import Layout, parse_layout, resolve_layout

VOID = {"meta", "br", "img", "link", "input", "hr"}
GIB = 2**30


class Reader(HTMLParser):
    """Fails on a tag that is not closed in order; collects attributes and texts by element."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.attributes, self.texts, self.hints = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title" and "svg" in self.open:
            self.hints.append(data)
        elif self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def layout_of(model: str, written: str, batch: int, **options) -> Layout:
    table = parse_layout(written).model_copy(update=options)
    world = table.pp * int(table.dp) * table.cp * table.tp
    return resolve_layout(table, load_model_spec(model), world, seq_len=4096, global_batch=batch)


def facts_of(model: str, *layouts: Layout, gpu: str = "h100", batch: int = 64) -> PlanFacts:
    """What the command gives the page, without a search: `layouts` are priced, and the first is the best."""
    work, stack = Workload(load_model_spec(model), 4096, batch), Stack("megatron")
    cluster = load_cluster(gpu, layouts[0].world)
    found = tuple(Pricer(work, cluster, stack).candidates(Columns.of(list(layouts))))
    best = found[0]
    picture = step_picture(work, cluster, stack, best)
    result = PlanResult(work, cluster, stack, found, found[:1], 1234, 56, 0.5, ("only what was given is priced",))
    return PlanFacts(
        result.as_json(), best.layout, stage_memory(work, best.layout), best.available_bytes, cluster.fast_domain,
        cluster.node_size, picture.timeline, picture.layer, picture.shown, picture.micro_batches,
        picture.step_seconds, 0.05 * best.available_bytes,
    )  # fmt: skip


@pytest.fixture(scope="module")
def facts() -> PlanFacts:
    model = "qwen3-30b-a3b"
    best = layout_of(model, "pp2 dp8 cp1 tp2 / ep8", 64)
    other = replace(layout_of(model, "pp2 dp16 cp1 tp1 / ep16", 64), overlap=("gradients",), recompute=("moe_act",))
    return facts_of(model, best, other)


def test_it_is_well_formed_and_needs_no_network(facts):
    page = plan_page(facts)
    reader = Reader(page)
    assert not [each for each in reader.attributes if each[1] in ("src", "href", "xlink:href")]
    assert not re.search(r"url\(|@import|//[a-z]", page)
    assert "prefers-color-scheme: dark" in page


def test_every_colour_is_defined_for_both_schemes(facts):
    page = plan_page(facts)
    style = page[page.index("<style>") : page.index("</style>")]
    for name in set(re.findall(r"var\((--[a-z0-9]+)", page)):
        assert style.count(f"{name}: ") == 2, name


def test_the_answer_stands_on_the_page(facts):
    text = Reader(plan_page(facts)).text
    best = facts.result["layouts"][0]
    low, high = best["interval_seconds"]
    assert "Qwen3-30B-A3B on 32 × H100" in text
    for figure in (
        best["layout"],
        "pp2 dp8 tp2 / edp2 ep8",
        f"{best['step_seconds']:#.3g} s",
        f"between {low:#.3g} and {high:#.3g} s",
        f"{best['tokens_per_second_per_gpu']:,.0f}",
        f"{best['model_tflops_per_gpu']:,.0f}",
        f"{best['memory_gib']:.1f}",
        f"{best['walls']['memory']:.1%}",
        f"{best['walls']['communication']:.1%}",
        "1,234 layouts priced",
        "56 fit in memory",
        "only what was given is priced",
    ):
        assert figure in text, figure


def test_every_layout_is_a_row_of_the_table(facts):
    page = plan_page(facts)
    table = page[page.index("The best layouts") : page.index("Where the ranks stand")]
    for each in facts.result["layouts"]:
        assert table.count(f"<code>{degrees_text(each['layout'])}</code>") == 1
        assert f"<td>{each['memory_gib']:.1f}</td>" in table
    assert "recompute moe_act" in table
    assert facts.result["layouts"][1]["against_best"] in table


@pytest.mark.parametrize(
    "written", ["pp2 dp8 cp1 tp2 / ep8", "pp1 dp1 cp1 tp1 / ep1", "dp8 cp2 / ep4 etp2", "dp16 tp2"]
)
def test_layouts_are_written_as_in_the_terminal(written):
    layout = layout_of("qwen3-30b-a3b", written, 64)
    for each in (
        layout,
        replace(layout, virtual_stages=4, micro_batch=2, cp_kind="ring", sharding="parameters"),
        replace(layout, overlap=OVERLAP, recompute=("full", "loss"), offload=("optimizer",), dispatcher="deepep"),
        replace(layout, schedule="zero_bubble" if layout.pp > 1 else layout.schedule),
    ):
        assert degrees_text(str(each)) == terminal.layout_text(each)
        assert options_text(terminal.options(each)) == terminal.options_text(each)


def test_every_pipeline_rank_has_its_memory_once(facts):
    hints = [hint for hint in Reader(plan_page(facts)).hints if "weights:" in hint]
    assert len(hints) == facts.layout.pp == 2
    for hint, stage in zip(hints, facts.stages, strict=True):
        name, *lines = hint.split("\n")
        assert name == f"rank {stage.rank}"
        parts = {line.split(": ")[0]: float(line.split(": ")[1].removesuffix(" GiB")) for line in lines}
        for part, (title, _) in MEMORY_NAMES.items():
            assert parts.get(title, 0.0) == pytest.approx(getattr(stage, part) / GIB, abs=0.006)
        assert sum(parts.values()) == pytest.approx(stage.total / GIB, abs=0.04)
    fullest = max(stage.total for stage in facts.stages)
    assert fullest == pytest.approx(facts.result["layouts"][0]["memory_gib"] * GIB)


def test_bars_are_as_long_as_the_bytes_are_many(facts):
    page = plan_page(facts)
    chart = page[page.index('<div class="chart memory">') :]
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)"', chart[: chart.index("</svg>")])
    limit = float(re.search(r'class="limit" x1="([\d.]+)"', chart)[1])
    first = float(bars[0][0])
    ends = [float(x) + float(wide) for x, wide in bars]
    for stage in facts.stages:
        end = first + (limit - first) * stage.total / facts.gpu_bytes
        assert any(abs(each - end) < 1 for each in ends)


def test_seconds_of_the_step_add_up(facts):
    page = plan_page(facts)
    section = page[page.index("Where the seconds go") :]
    shares = [float(share) for share in re.findall(r'<span style="width:([\d.]+)%', section)]
    seconds = facts.result["layouts"][0]["time_seconds"]
    assert sum(shares) == pytest.approx(100, abs=0.02)
    assert sorted(shares, reverse=True) == shares
    assert shares[0] == pytest.approx(100 * max(seconds.values()) / sum(seconds.values()), abs=0.001)


def test_every_rank_stands_once_in_each_mesh(facts):
    hints = [hint.split("\n") for hint in Reader(plan_page(facts)).hints if re.match(r"rank \d+, node", hint)]
    places = Counter(first for first, _ in hints)
    assert places == {f"rank {rank}, node {rank // 8}": 2 for rank in range(32)}
    said = dict(hints[: facts.layout.world]), dict(hints[facts.layout.world :])
    for rank in range(32):
        for mesh, coords in zip(said, (facts.layout.dense_coords(rank), facts.layout.expert_coords(rank)), strict=True):
            assert mesh[f"rank {rank}, node {rank // 8}"] == " ".join(f"{axis}{at}" for axis, at in coords.items())


def colours(mesh: str) -> dict[int, str]:
    """The colour of every rank."""
    found = re.findall(r'<title>rank (\d+),[^<]*</title><rect [^>]*style="([^"]*)"', mesh)
    return {int(rank): style for rank, style in found}


def squares(mesh: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r'class="rank-box" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', mesh)
    return [tuple(map(float, each)) for each in found]


@pytest.mark.parametrize(
    ("written", "options", "node", "domain"),
    [
        ("pp2 dp4 cp1 tp2 / ep8", {}, 8, 8),
        ("pp4 dp2 cp2 tp1 / ep2", {"order": "dp-outer"}, 8, 8),
        ("pp1 dp16 cp1 tp1 / ep4", {}, 8, 4),
        ("pp1 dp16 cp1 tp4 / ep32", {}, 4, 32),
        ("pp2 dp64 cp1 tp2 / ep16", {}, 4, 64),
        ("pp1 dp1 cp1 tp1 / ep1", {}, 1, 1),
        ("pp2 dp64 cp2 tp4 / ep64", {}, 8, 8),
    ],
)
def test_a_group_has_one_colour_and_its_neighbour_another(written, options, node, domain):
    layout = layout_of("qwen3-30b-a3b", written, 128, **options)
    both = meshes(layout, node, domain)
    assert both.shown == tuple(range(layout.world))
    for mesh, groups in ((both.dense, layout.groups("cp", "tp")), (both.expert, layout.expert_groups("ep", "etp"))):
        seen = colours(mesh)
        assert len(seen) == layout.world
        one = [{seen[rank] for rank in group} for group in groups]
        assert all(len(each) == 1 for each in one)
        assert all(one[at] != one[at + 1] for at in range(len(one) - 1))


@pytest.mark.parametrize(
    ("written", "node", "domain"),
    [
        ("pp1 dp1 cp1 tp1 / ep1", 8, 8),
        ("pp1 dp4 cp1 tp4 / ep16", 16, 16),
        ("pp1 dp16 cp1 tp1 / ep4", 8, 4),
        ("pp2 dp64 cp1 tp2 / ep16", 4, 64),
        ("pp2 dp64 cp2 tp4 / ep64", 8, 8),
        ("pp1 dp64 cp1 tp2 / ep64", 72, 72),
    ],
)
def test_squares_stay_in_the_picture_and_apart(written, node, domain):
    both = meshes(layout_of("qwen3-30b-a3b", written, 128), node, domain)
    for mesh in (both.dense, both.expert):
        wide, tall = map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', mesh).groups())
        boxes = squares(mesh)
        assert all(x >= 0 and y >= 0 and x + w <= wide and y + h <= tall for x, y, w, h in boxes)
        assert len({(x, y) for x, y, _, _ in boxes}) == len(boxes)
        side = boxes[0][2]
        rows: dict[float, list[float]] = {}
        for x, y, _, _ in boxes:
            rows.setdefault(y, []).append(x)
        for xs in rows.values():
            xs.sort()
            assert all(b - a > side for a, b in pairwise(xs))


def test_of_thousands_of_ranks_one_stage_is_shown_and_the_page_says_so():
    layout = layout_of("deepseek-v3", "pp4 dp128 cp1 tp4 / ep64", 8192)
    facts = facts_of("deepseek-v3", layout, batch=8192)
    both = meshes(layout, 8, 8)
    assert both.shown == layout.groups("dp", "cp", "tp")[0] == tuple(range(512))
    reader = Reader(plan_page(facts))
    assert "512 of 2,048 ranks are shown: their nodes hold pipeline rank 0 of 4" in reader.text
    assert "(4 ranks, inside a node)" in reader.text and "(64 ranks over 8 nodes)" in reader.text
    assert len(plan_page(facts)) < 2_000_000


def test_a_stage_too_large_is_cut_at_whole_nodes():
    layout = layout_of("qwen3-30b-a3b", "pp1 dp1024 cp1 tp2 / ep64", 8192)
    both = meshes(layout, 72, 72)
    assert len(both.shown) % 72 == 0 and MOST_SQUARES - 72 < len(both.shown) <= MOST_SQUARES


def test_a_group_spans_the_nodes_that_it_has_ranks_in():
    assert nodes_spanned([(0, 1), (2, 3)], 2) == 1
    assert nodes_spanned([(0, 1), (2, 7)], 2) == 2
    assert nodes_spanned([(0, 8, 16, 24)], 8) == 4


def test_a_dense_model_has_one_mesh():
    facts = facts_of("llama2-7b", layout_of("llama2-7b", "pp1 dp4 cp1 tp2", 64))
    text = Reader(plan_page(facts)).text
    assert "Dense mesh" in text and "Expert mesh" not in text


def test_text_from_outside_cannot_become_markup(facts):
    bad = "<img src=x onerror=alert(1)>\"'&amp;"
    result = facts.result | {"model": bad, "gpu": bad, "stack": bad, "notes": [bad]}
    best = result["layouts"][0]
    result["layouts"] = [best | {"notes": [bad + "2"], "options": best["options"] | {"dispatcher": bad}}]
    page = plan_page(replace(facts, result=result))
    assert "<img" not in page
    assert Reader(page).text.count(bad) >= 6


def test_parts_that_took_no_time_are_left_out(facts):
    best = facts.result["layouts"][0]
    only = best | {"time_seconds": dict.fromkeys(TIME_PARTS, 0.0) | {"compute": best["step_seconds"]}}
    page = plan_page(replace(facts, result=facts.result | {"layouts": [only]}))
    section = page[page.index("Where the seconds go") : page.index("The four walls")]
    assert "100.0%" in section and "bubble" not in section


def test_the_fastest_is_marked_once_also_off_the_front(facts):
    for front in (facts.result["front"], facts.result["layouts"][1:]):
        page = plan_page(replace(facts, result=facts.result | {"front": front}))
        plot = page[page.index("front-plot") : page.index("The best layouts")]
        assert plot.count("fill:var(--held)") == 1
        assert plot.count("<title>") == len(facts.result["layouts"])


def test_the_page_names_what_the_planner_counts():
    assert tuple(MEMORY_NAMES) == MEMORY_PARTS
    assert tuple(TIME_NAMES) == TIME_PARTS
    assert len({fill for _, fill in TIME_NAMES.values()}) == len(TIME_PARTS)


def test_a_simulation_that_disagrees_is_told(facts):
    told = facts.result["layouts"][0]["step_seconds"]
    assert "as simulated" not in plan_page(replace(facts, simulated_seconds=told))
    assert f"as simulated takes {1.5 * told:#.3g} s" in plan_page(replace(facts, simulated_seconds=1.5 * told))


def test_overlapped_layers_are_told_apart(facts):
    plain = replace(facts.layout, overlap=())
    paired = replace(facts.layout, overlap=OVERLAP[:5] + ("experts",))
    assert "Forward and backward of one layer" in plan_page(facts_of("qwen3-30b-a3b", plain))
    assert "beside backward of the one before" in plan_page(facts_of("qwen3-30b-a3b", paired))


def test_the_command_writes_it(tmp_path, capsys):
    path = tmp_path / "plan.html"
    assert main(["plan", "OLMoE-1B-7B", "--gpus", "2", "--html", str(path), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    text = Reader(path.read_text(encoding="utf-8")).text
    assert best["layout"] in text and f"{best['step_seconds']:#.3g} s" in text
