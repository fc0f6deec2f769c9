"""Links: tables and statistics of given numbers, what is planned, and the options of our candidates."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import links, links_plot, links_tables
from benchmarks.links_price import _over_mean
from benchmarks.links_tables import Measured, Setting
from benchmarks.peers.parallel.ours import options, table
from benchmarks.peers.parallel.registry import Degrees
from benchmarks.peers.workload import StepShape


def setting(topk: int, seconds: dict[str, float], predicted: dict[str, float], link: str = "1gbit") -> Setting:
    shape = {"hidden": 8, "ffn": 8, "experts": 8, "topk": topk, "tokens": 4, "micro_batch": 1}
    found = {name: Measured([[each, 3 * each], [each]], [2e6]) for name, each in seconds.items()}
    return Setting("layer", link, 2, 1, shape, found, predicted)


def test_seconds_are_medians_and_the_fastest_peer_is_one_that_computes_in_fp32() -> None:
    made = setting(
        2, {"moesaic alltoall": 2.0, "moesaic allgather": 4.0, "torchtitan": 1.0, "hf": 3.0, "deepspeed": 6.0}, {}
    )
    assert made.found["hf"].middle == 3.0 and made.found["hf"].megabytes == 2.0
    assert links_tables.peers(made) == ["hf", "deepspeed"] and links_tables.ours(made)[0] == "moesaic alltoall"
    assert links_tables.speedup(made, "moesaic alltoall", "hf") == 1.5
    assert math.isnan(links_tables.speedup(made, "moesaic alltoall", "megatron_alltoall"))
    assert "| 2 | 2 | 1gbit | hf 3.000 | alltoall 2.000 | 1.50 |" in links_tables.sweep_table([made])


def test_what_is_chosen_is_what_the_cost_model_says_is_fastest() -> None:
    made = setting(
        2, {"moesaic alltoall": 2.0, "moesaic allgather": 4.0}, {"moesaic alltoall": 5.0, "moesaic allgather": 1.0}
    )
    assert links_tables.chosen(made) == "moesaic allgather"
    assert links_tables.chosen(setting(2, {"moesaic alltoall": 1.0}, {})) == "moesaic alltoall"


def test_a_crossing_lies_where_the_line_through_two_points_is_zero() -> None:
    assert links_tables.crossing([(1, -1.0), (2, -1.0), (4, 3.0)]) == pytest.approx(2.5)
    assert links_tables.crossing([(1, 1.0), (2, 2.0)]) == -math.inf
    assert links_tables.crossing([(1, -2.0), (2, -1.0)]) == math.inf
    assert math.isnan(links_tables.crossing([]))
    assert links_tables.crossing([(1, 1.0), (2, 0.0)]) == 2
    one, two = "moesaic alltoall", "moesaic allgather"
    layers = [
        setting(k, {one: seconds, two: 2.0}, {one: float(k), two: 6.0}) for k, seconds in ((8, 5.0), (1, 1.0), (4, 3.0))
    ]
    assert list(links_tables.crossings(layers)) == [(2, "1gbit", pytest.approx(2.5), pytest.approx(6.0))]


def test_the_link_for_a_share_follows_from_two_steps() -> None:
    # 1 s of its own and 2 s over 100 Mbit/s: for half of a step, 1 s, the link is twice as fast.
    assert links_tables.link_for_share(1.0, 3.0, "100mbit", 0.5) == "200mbit"
    assert links_tables.bits("2gbit") == 2e9 and links_tables.bits("none") == math.inf


def test_predictions_are_counted_within_15_percent_and_picks_against_the_best() -> None:
    made = [
        setting(1, {"moesaic a": 1.0, "moesaic b": 1.1}, {"moesaic a": 1.14, "moesaic b": 1.0}),
        setting(2, {"moesaic a": 1.0}, {"moesaic a": 2.0}),
    ]
    found = links_tables.fit(made)
    assert sorted(found.ratios.values()) == pytest.approx([1 / 1.1, 1.14, 2.0])
    assert found.within == pytest.approx(2 / 3)
    assert list(found.picks.values()) == pytest.approx([1.1, 1.0])


def test_settings_survive_being_written() -> None:
    made = setting(2, {"moesaic alltoall": 2.0}, {"moesaic alltoall": 1.0})
    assert links_tables.from_json(made.as_json()) == made


def test_words_of_a_candidate_are_words_of_a_layout() -> None:
    assert options("alltoall+inside") == {"overlap": ["inside"], "dispatcher": "alltoall"}
    assert options("") == {"overlap": "none"}
    shape = StepShape(batch=8, micro_batch=2)
    made = table(shape, Degrees(dp=2, ep=2), "allgather+experts+weight_gradients")
    assert made.micro_batch == 2 and made.overlap == ["experts", "weight_gradients"]
    assert table(shape, Degrees(dp=2, cp=2), "ring").cp_kind == "ring"


def test_the_planner_is_tried_on_20_layouts_and_a_layer_on_every_link() -> None:
    args = links.parser().parse_args(["--envs", "none"])
    jobs = list(links.planner_jobs(args))
    assert sum(len(job.candidates) for job in jobs) == 20
    assert all(job.shape.batch // job.degrees.dp % job.shape.micro_batch == 0 for job in jobs)  # type: ignore[union-attr]
    layers = list(links.layer_jobs(args, 4))
    assert {job.shape.topk for job in layers} == {1, 2, 4, 8}
    names = [peer.name for peer in layers[0].candidates]
    assert "moesaic hierarchical" in names and "megatron_alltoall" in names
    assert all(job.links == links.LINKS for job in layers)


def test_a_plot_has_a_panel_for_each_top_k_and_a_line_for_each_candidate() -> None:
    found = {"moesaic alltoall": 1.0, "moesaic allgather": 2.0, "hf": 4.0}
    made = [setting(k, found, {"moesaic allgather": 1.0}, link) for k in (1, 2) for link in ("none", "200mbit")]
    drawn = links_plot.lines(made[:2])
    assert drawn["hf"] == [(2e8, 4.0), (links_plot.FASTER, 4.0)]
    assert drawn["moesaic, as chosen"][0] == (2e8, 2.0) and drawn["moesaic, best"][0] == (2e8, 1.0)
    tree = ElementTree.fromstring(links_plot.draw(made))
    assert sum(each.tag.endswith("polyline") for each in tree.iter()) == 2 * 3
    assert links_plot.draw([])


def test_the_most_loaded_rank_over_the_mean() -> None:
    assert _over_mean(torch.tensor([3, 1, 0, 0]), 2) == 2.0
    assert _over_mean(torch.tensor([1, 2, 2, 1]), 2) == 1.0
