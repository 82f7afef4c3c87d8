"""The search: points of a grid, chosen by training metrics, and the winner's neighbours."""

import math
import types

import pytest

from dp2_keras.experiments import configuration, methods, problems, reproduce, search, tasks

GRID = {"a": list(range(10)), "b": [0.1, 0.2, 0.3]}


def test_candidates_are_points_of_the_grid_without_twins_and_the_same_every_time():
    points = search.candidates(GRID, 20)
    assert points == search.candidates(GRID, 20) != search.candidates(GRID, 20, seed=1)
    assert len({tuple(point.items()) for point in points}) == 20
    assert all(point["a"] in GRID["a"] and point["b"] in GRID["b"] for point in points)
    assert len(search.candidates(GRID, 100)) == 30
    assert points[:2] == [{"a": 8, "b": 0.1}, {"a": 6, "b": 0.1}]


def candidate_row(a, train, test=0.0):
    return {"hyper": {"a": a, "b": 0.2}, "curve": [{"train": 0.0}, {"train": train, "test": test}]}


def test_the_winner_has_the_best_training_metric_whatever_test_says():
    rows = [candidate_row(3, 0.8, test=0.9), candidate_row(4, 0.9, test=0.1), candidate_row(5, "nan")]
    choice = search.choose(rows, problems.Binary(), GRID, runs=4)
    assert choice == search.Choice({"a": 4, "b": 0.2}, runs=4, failed=2, train=0.9, edges=())
    assert search.choose(rows, problems.Ratings(), GRID, runs=3).hyper["a"] == 3
    assert search.choose([candidate_row(5, "nan")], problems.Ratings(), GRID, runs=1) is None


def test_the_best_third_survives_a_round_of_halving():
    rows = [candidate_row(a, train) for a, train in enumerate([0.5, "nan", 0.9, 0.7])]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Binary())] == [2, 3]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Ratings())] == [0, 3]
    assert search.survivors(rows[1:2], problems.Binary()) == []


def test_a_winner_on_an_edge_is_flagged():
    assert search.choose([candidate_row(9, 0.8)], problems.Binary(), GRID, 1).edges == ("a",)
    assert search.edges({"a": 0, "b": 0.3}, GRID) == ("a", "b")
    assert search.edges({"a": 5}, {"a": [5]}) == ()


@pytest.mark.parametrize("method", [name for name in methods.METHODS if methods.get(name).space])
def test_a_grid_is_large_enough_for_sixty_runs_and_as_wide_as_the_papers(method):
    for name in ("imdb", "movielens"):
        grid = methods.grid(method, tasks.get(name), 390, 50)
        if method not in ("SGD",):
            assert math.prod(len(values) for values in grid.values()) >= 60
        assert all(values == sorted(set(values)) for values in grid.values())
    assert {0.03, 0.1, 0.3, 1, 3} <= set(grid.get("learning_rate", [0.03, 0.1, 0.3, 1, 3]))
    assert {0.1, 0.25, 0.5, 1} <= set(grid.get("l2_norm_clip", [0.1, 0.25, 0.5, 1]))
    assert {1e-2, 1e-3, 1e-5, 1e-7} <= set(grid.get("eps", [1e-2, 1e-3, 1e-5, 1e-7]))


def test_delays_are_steps_of_the_tasks_epochs():
    assert {195, 390, 780} <= set(methods.grid("DP2RMSprop", tasks.get("imdb"), 390, 100)["delay"])
    assert methods.grid("DP2RMSprop", tasks.get("imdb"), 12, 60)["delay"] == [1, 3, 6, 12, 24, 48]
    assert min(methods.grid("DP2RMSpropExtraQuery", tasks.get("imdb"), 12, 60)["delay"]) == 2
    assert methods.grid("DPSGD", tasks.get("imdb"), 12, 60, learning_rate=[7])["learning_rate"] == [7]


def test_delays_end_within_a_run():
    delays = lambda epochs: methods.grid("DP2RMSprop", tasks.get("movielens"), 40, epochs)["delay"]  # noqa: E731
    assert delays(50) == [4, 20, 40, 120, 400, 1000, 1600]
    assert delays(25) == delays(20) == [4, 20, 40, 120, 400]


def test_delays_of_a_configuration_end_within_a_run_too():
    assert methods.grid("DP2RMSprop", tasks.get("imdb"), 12, 1, delay=[5, 50])["delay"] == [5]


def test_neighbours_differ_in_one_value_and_go_past_the_ends():
    grid = {"rate": [0.1, 0.3, 1], "delay": [1, 4], "power": [0.5, 1]}
    points = search.neighbours({"rate": 1, "delay": 1, "power": 1}, grid)
    assert [{name: p[name] for name in p if p[name] != 1} for p in points] == [
        {"delay": 4}, {"power": 0.5}, {"power": 2}, {"rate": 0.3}, {"rate": 3},
    ]  # fmt: skip


def test_a_refinement_keeps_its_delay_within_the_run(tmp_path):
    case = configuration.Case(
        "", "synthetic", 1, 50, 1.0, None, "DP2RMSprop", None, "ours", None, space={}, varied={}
    )
    one = reproduce.Search(case, {"delay": [10, 20]}, reproduce.Options(str(tmp_path), search=2, refine=9))
    rows = [{"hyper": {"delay": delay}, "curve": [{"train": delay}]} for delay in (10, 20)]
    assert {run.hyper["delay"] for run in one.runs} == {10, 20}
    assert one.next_runs(types.SimpleNamespace(of=lambda keys: rows)) == []  # 40 would be all of 40 steps.
    rows[0]["curve"][0]["train"] = 30
    assert [run.hyper for run in one.next_runs(types.SimpleNamespace(of=lambda keys: rows))] == [{"delay": 5}]


def refined(tmp_path, metric, refine):
    """The points of a search for `metric`, a function of the rate, and what it chose."""
    case = configuration.Case(
        "", "synthetic", 1, 50, 1.0, None, "DPSGD", None, "ours", None, space={}, varied={}
    )
    options = reproduce.Options(str(tmp_path), search=3, refine=refine)
    one = reproduce.Search(case, {"learning_rate": [1, 2, 4]}, options)

    def rows(keys):
        return [{"hyper": r.hyper, "curve": [{"train": metric(r.hyper["learning_rate"])}]} for r in one.runs]

    store = types.SimpleNamespace(of=rows)
    while one.next_runs(store):
        pass
    return [run.hyper["learning_rate"] for run in one.runs[3:]], one.choice(store)


def test_a_search_goes_past_an_end_until_its_winner_is_inside(tmp_path):
    points, choice = refined(tmp_path, lambda rate: -abs(rate - 16), refine=1)
    assert points == [8, 16, 32] and choice.hyper == {"learning_rate": 16} and choice.edges == ()
    assert choice.runs == 6


def test_a_search_past_an_end_has_an_end(tmp_path):
    points, choice = refined(tmp_path, lambda rate: rate, refine=1)
    assert points == [2**k for k in range(3, 12)] and choice.edges == ("learning_rate",)


def test_a_winner_inside_is_not_gone_past(tmp_path):
    assert refined(tmp_path, lambda rate: -abs(rate - 2), refine=1)[1].runs == 3
    assert refined(tmp_path, lambda rate: rate, refine=0)[1].runs == 3
