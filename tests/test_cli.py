"""The command prints what the library computes, and fails in one line."""

import subprocess
import sys

import pytest

import dp2_keras
from dp2_keras import accounting
from dp2_keras.entries import Entry, Mechanism, PoissonSampling
from dp2_keras.ledger import Ledger
from dp2_keras.statement_text import round_up

IMDB = "--dataset-size 25000 --batch-size 64 --epochs 100"
SMALL = "--dataset-size 1000 --batch-size 100"
ONE_STEP = "--noise-multiplier 1 --steps 1"
MECHANISM = Mechanism("DP2RMSprop", noise_multipliers=(1.0,), l2_norm_clips=(5.0, 0.5))
LEDGER = Ledger([Entry.of_run(MECHANISM, PoissonSampling(25_000, 64), 39_000)])


def assert_fails(result, status, *words):
    """In one line that says what is wrong."""
    assert result[0] == status
    assert result[1] == ""
    assert result[2].startswith("dp2") and ": error: " in result[2]
    assert result[2].endswith("\n") and result[2].count("\n") == 1
    for word in words:
        assert word in result[2]


# epsilon


@pytest.mark.parametrize(
    "options, figure",
    [
        (f"{IMDB} --noise-multiplier 1.0 --delta 1e-5", "epsilon = 3.03051 at delta = 1e-05, proved"),
        (f"{IMDB} --noise-multiplier 1", "epsilon = 3.03051 at delta = 1e-05, proved"),
        (f"{IMDB} --noise-multiplier 1 --accountant pld", "epsilon = 2.786"),
        (f"{IMDB} --noise-multiplier 0", "epsilon = infinity at delta = 1e-05, no guarantee"),
        (f"{IMDB} --noise-multiplier 1 --shuffle", "epsilon = 96.11"),
    ],
)
def test_epsilon_prints_the_known_figures_first(run, options, figure):
    status, out, err = run(f"epsilon {options}")
    assert (status, err) == (0, "")
    assert out.startswith(figure)


@pytest.mark.parametrize("neighbors", ["add_remove", "replace_one"])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("limit", [None, 150])
def test_epsilon_is_that_of_the_library(run, accountant, neighbors, limit):
    options = f"--accountant {accountant} --neighbors {neighbors}" + (
        f" --max-batch-size {limit}" if limit else ""
    )
    _, out, _ = run(f"epsilon {SMALL} --steps 7 --noise-multiplier 2.5 --delta 1e-3 {options}")
    mechanism = Mechanism("any", (2.5,), (1.0,))
    ledger = Ledger([Entry.of_run(mechanism, PoissonSampling(1000, 100, limit), 7)])
    expected = ledger.epsilon(1e-3, accountant=accountant, neighbors=neighbors)
    assert out.startswith(f"epsilon = {round_up(expected)} at delta = 0.001, ")
    assert f"{accountant.upper()} accounting (dp-accounting " in out
    assert ("replaced" in out) == (neighbors == "replace_one")
    assert ("cut at 150" in out) == (limit is not None)


@pytest.mark.parametrize(
    "options, steps",
    [
        ("--dataset-size 1050 --batch-size 100 --epochs 3", "30 steps of Poisson"),
        ("--dataset-size 1050 --batch-size 100 --steps 31", "31 steps of Poisson"),
        ("--dataset-size 1050 --batch-size 100 --epochs 3 --shuffle", "33 steps of shuffled"),
    ],
)
def test_epoch_is_n_over_b_steps_rounded_down_or_as_keras_shuffles(run, options, steps):
    assert (
        f"  {steps} batches of 100 out of 1,050 examples" in run(f"epsilon {options} --noise-multiplier 1")[1]
    )


def test_shuffled_batches_have_a_proved_and_an_assumed_figure(run):
    lines = run(f"epsilon {IMDB} --noise-multiplier 1 --shuffle")[1].splitlines()
    assert lines[0].startswith("epsilon = 96.11") and lines[0].endswith("at delta = 1e-05, proved")
    assert lines[1].startswith("epsilon = 3.03") and "assumed and NOT proved" in lines[1]


def test_default_delta_is_named_and_a_large_one_cautioned(run):
    assert "delta by default" in run(f"epsilon {IMDB} --noise-multiplier 1")[1]
    chosen = run(f"epsilon {IMDB} --noise-multiplier 1 --delta 1e-3")[1]
    assert "delta by default" not in chosen and "CAUTION: delta is above 1 / n" in chosen


# calibrate


@pytest.mark.parametrize("target", [0.5, 3.0, 8.0])
def test_calibrated_noise_is_the_least_that_keeps_to_the_target(run, target):
    status, out, err = run(f"calibrate --target-epsilon {target} {SMALL} --epochs 5 --delta 1e-4")
    assert (status, err) == (0, "")
    sigma = float(out.splitlines()[0].removeprefix("noise multiplier = "))
    cost = lambda s: accounting.epsilon(accounting.dp_event(s, 0.1, 50), 1e-4)  # noqa: E731
    assert cost(sigma) <= target < cost(sigma - 2e-4)
    assert f"epsilon = {round_up(cost(sigma))} at delta = 0.0001, proved" in out


def test_calibrates_the_papers_setting(run):
    assert run(f"calibrate --target-epsilon 3 {IMDB}")[1].startswith(
        "noise multiplier = 1.00557\nepsilon = 2.999"
    )


def test_calibrated_noise_is_what_epsilon_prices(run):
    calibrated = run(f"calibrate --target-epsilon 2 {SMALL} --epochs 5")[1].splitlines()
    sigma = calibrated[0].split()[-1]
    assert run(f"epsilon {SMALL} --epochs 5 --noise-multiplier {sigma}")[1].splitlines() == calibrated[1:]


# Wrong arguments


@pytest.mark.parametrize(
    "line, words",
    [
        ("", ["{epsilon,calibrate,statement,audit,reproduce}"]),
        ("price", ["price"]),
        ("epsilon", ["required", "--dataset-size", "--batch-size", "--noise-multiplier"]),
        (f"epsilon {SMALL} --noise-multiplier 1", ["one of the arguments --epochs --steps is required"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 1 --steps 1", ["not allowed with"]),
        (f"epsilon {SMALL} --noise-multiplier -1 --epochs 1", ["--noise-multiplier must be", "-1"]),
        (f"epsilon {SMALL} --noise-multiplier nan --epochs 1", ["--noise-multiplier must be", "nan"]),
        (f"epsilon {SMALL} --noise-multiplier x --epochs 1", ["--noise-multiplier", "'x'"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 0", ["--epochs must be a positive integer"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --epochs 1.5", ["--epochs", "'1.5'"]),
        (f"epsilon {SMALL} --noise-multiplier 1 --steps 0", ["--steps must be a positive integer"]),
        (f"epsilon {SMALL} {ONE_STEP} --delta 1", ["--delta must be", "less than 1"]),
        (f"epsilon {SMALL} {ONE_STEP} --delta nan", ["--delta must be"]),
        (f"epsilon {SMALL} {ONE_STEP} --accountant gdp", ["--accountant", "rdp", "pld"]),
        (f"epsilon {SMALL} {ONE_STEP} --neighbors user", ["--neighbors", "replace_one"]),
        (f"epsilon {SMALL} {ONE_STEP} --max-batch-size 0", ["--max-batch-size must be"]),
        (f"epsilon {SMALL} {ONE_STEP} --max-batch-size 9 --shuffle", ["leave out --shuffle or"]),
        (f"epsilon {SMALL} --noise 1 --steps 1", ["--noise-multiplier"]),
        (f"epsilon --dataset-size 10 --batch-size 11 {ONE_STEP}", ["--batch-size must be at most"]),
        (f"epsilon --dataset-size 0 --batch-size 1 {ONE_STEP}", ["--dataset-size must be a positive"]),
        (f"epsilon --dataset-size 1 --batch-size 1 {ONE_STEP}", ["--dataset-size must be at least 2"]),
        (f"calibrate {SMALL} --epochs 1", ["required", "--target-epsilon"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon 0", ["--target-epsilon must be"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon inf", ["--target-epsilon must be"]),
        (f"calibrate {SMALL} --epochs 0 --target-epsilon 1", ["--epochs must be a positive integer"]),
        (f"calibrate {SMALL} --epochs 1 --target-epsilon 1 --delta 2", ["--delta must be"]),
        ("statement", ["required", "file"]),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_status_2(run, line, words):
    assert_fails(run(line), 2, *words)


@pytest.mark.parametrize("line", ["--help", "epsilon --help", "calibrate --help", "statement --help"])
def test_help_is_no_error(run, line):
    status, out, err = run(line)
    assert (status, err) == (0, "") and "usage: dp2" in out


def test_version(run):
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"dp2_keras {dp2_keras.__version__} (dp-accounting ")


# As a module.


@pytest.mark.parametrize(
    "line, status", [(f"epsilon {IMDB} --noise-multiplier 1", 0), ("statement no.keras", 1), ("", 2)]
)
def test_module_runs_as_a_command(line, status):
    command = [sys.executable, "-m", "dp2_keras.cli", *line.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == status
    assert (result.stdout if status == 0 else result.stderr).count("epsilon = 3.03051") == (status == 0)
    assert "Traceback" not in result.stderr
