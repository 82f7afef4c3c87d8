"""The search: points of a grid, chosen by training metrics, and the winner's neighbours."""

import math

import pytest

from dp2_keras.experiments import configuration, methods, problems, reproduce, search, tasks
from dp2_keras.public_data import DEFAULT_BATCH_SIZE

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
    choice = search.choose(rows, problems.Binary(), runs=4)
    assert choice == search.Choice({"a": 4, "b": 0.2}, runs=4, failed=2, train=0.9, edges=())
    assert search.choose(rows, problems.Ratings(), runs=3).hyper["a"] == 3
    assert search.choose([candidate_row(5, "nan")], problems.Ratings(), runs=1) is None


def test_the_best_third_survives_a_round_of_halving():
    rows = [candidate_row(a, train) for a, train in enumerate([0.5, "nan", 0.9, 0.7])]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Binary())] == [2, 3]
    assert [hyper["a"] for hyper in search.survivors(rows, problems.Ratings())] == [0, 3]
    assert search.survivors(rows[1:2], problems.Binary()) == []


def grid_of(method, task, steps_per_epoch, epochs, **wider):
    """As of a run of so many steps, with enough public examples."""
    within = methods.limits(method, epochs * steps_per_epoch, public_rows=250)
    return methods.grid(method, tasks.get(task), steps_per_epoch, within, **wider)


@pytest.mark.parametrize("method", [name for name in methods.METHODS if methods.get(name).space])
def test_a_grid_is_large_enough_for_sixty_runs_and_as_wide_as_the_papers(method):
    for name in ("imdb", "movielens"):
        grid = grid_of(method, name, 390, 50)
        if method not in ("SGD",):
            assert math.prod(len(values) for values in grid.values()) >= 60
        assert all(values == sorted(set(values)) for values in grid.values())
    assert {0.03, 0.1, 0.3, 1, 3} <= set(grid.get("learning_rate", [0.03, 0.1, 0.3, 1, 3]))
    assert {0.1, 0.25, 0.5, 1} <= set(grid.get("l2_norm_clip", [0.1, 0.25, 0.5, 1]))
    assert {1e-2, 1e-3, 1e-5, 1e-7} <= set(grid.get("eps", [1e-2, 1e-3, 1e-5, 1e-7]))


def test_delays_are_steps_of_the_tasks_epochs():
    assert {195, 390, 780} <= set(grid_of("DP2RMSprop", "imdb", 390, 100)["delay"])
    assert grid_of("DP2RMSprop", "imdb", 12, 60)["delay"] == [1, 3, 6, 12, 24, 48]
    assert min(grid_of("DP2RMSpropExtraQuery", "imdb", 12, 60)["delay"]) == 2
    assert grid_of("DPSGD", "imdb", 12, 60, learning_rate=[7])["learning_rate"] == [7]


def test_delays_end_within_a_run():
    delays = lambda epochs: grid_of("DP2RMSprop", "movielens", 40, epochs)["delay"]  # noqa: E731
    assert delays(50) == [4, 20, 40, 120, 400, 1000, 1600]
    assert delays(25) == delays(20) == [4, 20, 40, 120, 400]


def test_values_of_a_configuration_are_within_the_limits_too():
    assert grid_of("DP2RMSprop", "imdb", 12, 1, delay=[5, 50])["delay"] == [5]
    assert grid_of("DP2NoiseFloor", "imdb", 12, 1, power=[0, 1, 2])["power"] == [0, 1]


def test_a_list_with_no_value_within_the_limits_is_refused():
    with pytest.raises(ValueError, match=r"`delay` must be between 1 and 11 .* Received: delay=\[50\]"):
        grid_of("DP2RMSprop", "imdb", 12, 1, delay=[50])


def test_neighbours_differ_in_one_value_and_go_past_the_ends():
    grid = {"rate": [0.1, 0.3, 1], "delay": [1, 4], "clip": [0.05, 2, 5]}
    points = search.neighbours({"rate": 1, "delay": 1, "clip": 5}, grid, limits={})
    assert [{name: p[name] for name in p if p[name] != {"clip": 5}.get(name, 1)} for p in points] == [
        {"clip": 2}, {"clip": 12.5}, {"delay": 4}, {"rate": 0.3}, {"rate": 3.33},
    ]  # fmt: skip


def test_neighbours_go_no_further_than_a_limit():
    near = lambda value, **limits: [  # noqa: E731
        point["a"] for point in search.neighbours({"a": value}, {"a": [2, 4, 8]}, limits)
    ]
    assert near(8) == near(8, a=(1, 16)) == [4, 16] and near(2) == near(2, a=(1, 16)) == [1, 4]
    assert near(8, a=(1, 11)) == [4, 11] and near(2, a=(1.5, 16)) == [1.5, 4]
    assert near(8, a=(1, 8)) == [4] and near(2, a=(2, 16)) == [4]


def test_next_to_0_there_is_nothing_further_out():
    near = lambda value: search.neighbours({"a": value}, {"a": [0, 1]}, {})  # noqa: E731
    assert near(1) == [{"a": 0}] and near(0.0) == [{"a": 1}]


def test_outwards_is_the_next_value_of_a_hyper_parameter_that_stands_at_an_end():
    grid, tried = {"a": [1, 2, 4], "b": [1, 2, 4]}, {"a": [1, 2, 4, 8, 16], "b": [1, 2, 4]}
    outwards = lambda **hyper: search.outwards(hyper, grid, tried, limits={"b": (1, 6)})  # noqa: E731
    assert outwards(a=4, b=2) == {"a": {"a": 8, "b": 2}}
    assert outwards(a=8, b=1) == {"a": {"a": 16, "b": 1}}  # b: at its limit.
    assert outwards(a=2, b=4) == {"b": {"a": 2, "b": 6}}
    assert search.outwards({"a": 5}, {"a": [5]}, {"a": [5]}, limits={}) == {}


@pytest.mark.parametrize(
    "method, name, limits",
    [
        ("DP2NoiseFloor", "power", (0, 1)),
        ("DP2RMSprop", "delay", (1, 99)),
        ("DP2RMSpropExtraQuery", "delay", (2, 99)),
        ("DPAdam", "eps", (methods.LEAST_EPS, math.inf)),
        ("DPAdagradPublicSubspace", "subspace_size", (1, 10)),
    ],
)
def test_limits_are_those_of_the_run_and_of_the_method(method, name, limits):
    assert methods.limits(method, steps=100, public_rows=10)[name] == limits


def test_a_subspace_has_no_more_dimensions_than_a_public_batch_has_rows():
    assert methods.PUBLIC_BATCH_SIZE == DEFAULT_BATCH_SIZE
    assert methods.limits("DPAdagradPublicSubspace", 100, public_rows=250)["subspace_size"] == (1, 64)


NONE = {}


class Searched:
    """A search that has run to its end, where training gives `metric` of a point, or fails with None."""

    def __init__(self, tmp_path, metric, grid, limits=NONE, epochs=1, **options):
        self.metric, self.rows, self.waves = metric, {}, []
        one = reproduce.Search(case_of(epochs), grid, limits, reproduce.Options(str(tmp_path), **options))
        fresh = one.runs
        while fresh:
            self.waves.append(fresh)
            self.rows.update({run.key: run for run in fresh})
            fresh = one.next_runs(self)
        self.choice = one.choice(self)

    @property
    def later(self):
        return [run.hyper for wave in self.waves[1:] for run in wave]

    def of(self, keys):
        """As of a store: rows of the runs that did not fail."""
        found = [(self.rows[key].hyper, self.metric(**self.rows[key].hyper)) for key in keys]
        return [{"hyper": h, "curve": [{"train": train}]} for h, train in found if train is not None]


def case_of(epochs):
    return configuration.Case(
        "", "synthetic", epochs, 50, 1.0, None, "DPSGD", None, "ours", None, space={}, varied={}
    )


def test_a_refinement_keeps_within_the_limits(tmp_path):
    best_at = lambda best: lambda delay: -abs(delay - best)  # noqa: E731
    options = dict(grid={"delay": [10, 20]}, limits={"delay": (1, 39)}, search=2, refine=9)
    late = Searched(tmp_path, best_at(99), **options)
    assert late.later == [{"delay": 39}] and late.choice.edges == ()
    early = Searched(tmp_path, best_at(1), **options)
    assert early.later == [{"delay": 5}, {"delay": 2}, {"delay": 1}] and early.choice.edges == ()


RATES = {"learning_rate": [1, 2, 4]}


def rates(points):
    return [point["learning_rate"] for point in points]


def test_a_search_goes_past_an_end_until_its_winner_is_inside(tmp_path):
    found = Searched(tmp_path, lambda learning_rate: -abs(learning_rate - 16), RATES, search=3, refine=1)
    assert rates(found.later) == [8, 16, 32] and rates([found.choice.hyper]) == [16]
    assert found.choice.edges == () and found.choice.runs == 6


def test_a_search_past_an_end_has_an_end(tmp_path):
    found = Searched(tmp_path, lambda learning_rate: learning_rate, RATES, search=3, refine=1)
    assert rates(found.later) == [2**k for k in range(3, 12)] and found.choice.edges == ("learning_rate",)


def test_a_search_without_refinement_flags_its_edges(tmp_path):
    found = Searched(tmp_path, lambda learning_rate: learning_rate, RATES, search=3)
    assert found.later == [] and found.choice.edges == ("learning_rate",)
    inside = Searched(tmp_path, lambda learning_rate: -abs(learning_rate - 2), RATES, search=3)
    assert inside.later == [] and inside.choice.edges == ()


def test_after_its_runs_around_a_winner_a_search_goes_outwards_alone(tmp_path):
    grid = {"learning_rate": [0.5, 1, 2, 4], "l2_norm_clip": [0.5, 1, 2, 4]}
    far = lambda learning_rate, l2_norm_clip: -abs(learning_rate - 16) - abs(l2_norm_clip - 1) / 10  # noqa: E731
    found = Searched(tmp_path, far, grid, search=16, refine=1)
    assert len(found.later) == 3 and found.choice.hyper == {"learning_rate": 16, "l2_norm_clip": 1}
    assert {p["l2_norm_clip"] for p in found.later} == {1}  # Clips beside 1 are not run at rates past 4.


def test_an_end_that_another_point_went_past_is_an_end_still(tmp_path):
    grid = {"learning_rate": [1, 2, 4], "l2_norm_clip": [1, 2, 4]}
    loss = lambda learning_rate, l2_norm_clip: abs(learning_rate - 16) + 3 * abs(l2_norm_clip - 8)  # noqa: E731
    found = Searched(tmp_path, lambda **point: -loss(**point), grid, search=9, refine=1)
    assert found.choice.hyper == {"learning_rate": 16, "l2_norm_clip": 8} and found.choice.edges == ()


def test_a_value_that_fails_is_tried_once_and_is_no_edge(tmp_path):
    grows = lambda learning_rate: None if learning_rate > 8 else learning_rate  # noqa: E731
    found = Searched(tmp_path, grows, RATES, search=3, refine=4)
    assert rates(found.later) == [8, 16] and found.choice.edges == () and found.choice.failed == 1


def test_past_ends_come_after_the_rounds_of_a_halving(tmp_path):
    best_at_8 = lambda learning_rate: -abs(learning_rate - 8)  # noqa: E731
    found = Searched(tmp_path, best_at_8, RATES, epochs=4, search=3, halving=True, refine=1)
    first, *later = [[(run.epochs, run.hyper["learning_rate"]) for run in wave] for wave in found.waves]
    assert sorted(first) == [(1, 1), (1, 2), (1, 4)]
    assert later == [[(2, 4)], [(4, 4)], [(4, 2)], [(4, 8)], [(4, 16)]]
    assert found.choice == search.Choice({"learning_rate": 8}, runs=6, failed=0, train=0, dropped=2)
