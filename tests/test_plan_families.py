"""Large runs from small ones: the model against scikit-learn and closed forms, rows, and what held-out families say."""

import json
import math
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, WhiteKernel

from multipod.cli.main import cli
from multipod.errors import PlanError
from multipod.experiments import planner_families
from multipod.plan.families.conditional import fitted, predicted
from multipod.plan.families.forecast import WIDTHS, forecasts, intervals
from multipod.plan.families.held_out import TRUTH, HeldOut, coverage, held_out, median_of_families, width
from multipod.plan.families.mixed import MixedModel, RandomWalk, Term
from multipod.plan.families.rows import FamilyRow, asked_rows, by_family, public_rows, read_rows, reference_rows

ROW = FamilyRow("ours", "resnet", "NVIDIA A100", 8, 8, 3264, 1, 22525.2, 52_527_847, 41, 2366.7, 13.0)
UNKNOWN = {"throughput_per_s": None, "samples": None, "epochs": None, "run_s": None, "init_s": None}


def random_values(rows=24, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=rows)
    return x, 0.7 + 1.3 * x + 0.1 * random.normal(size=rows)


def test_the_mixed_model_predicts_as_scikit_learns_gaussian_process():
    x, y = random_values()
    model = MixedModel([Term(np.ones(24), None, 0.8), Term(x, None, 1.5)], noise=0.2)
    known, asked = np.arange(16), np.arange(16, 24)
    mean, sd = model.predict(model.guess, y, known, asked)
    kernel = ConstantKernel(2.25) * DotProduct(sigma_0=0.8 / 1.5) + WhiteKernel(0.04)
    theirs = GaussianProcessRegressor(kernel, optimizer=None).fit(x[:16, None], y[:16])
    expected, expected_sd = theirs.predict(x[16:, None], return_std=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(sd, expected_sd, rtol=1e-4)  # theirs adds 1e-10 to the diagonal


def test_what_a_group_shares_shrinks_as_the_textbook_has_it():
    """One-way random effects: n rows of a group with mean m foretell n s^2 / (n s^2 + e^2) m."""
    values = np.array([1.0, 2.0, 0.0])
    model = MixedModel([Term(np.ones(3), ["a", "a", "a"], sd=0.5)], noise=0.25)
    mean, sd = model.predict(model.guess, values, np.array([0, 1]), np.array([2]))
    share = 2 * 0.25 / (2 * 0.25 + 0.0625)
    assert mean[0] == pytest.approx(share * 1.5)
    assert sd[0] ** 2 == pytest.approx(0.25 * (1 - share) + 0.0625)
    alone = MixedModel([Term(np.ones(3), ["a", "a", "b"], sd=0.5)], noise=0.25)
    assert alone.predict(alone.guess, values, np.array([0, 1]), np.array([2]))[0][0] == 0


def test_a_walk_is_as_uncertain_as_it_is_far():
    places = np.array([0.0, 1.0, 3.0])
    flat = Term(np.ones(3), ["a"] * 3, sd=100.0, fixed=True)
    model = MixedModel([flat], [RandomWalk(places, ["a"] * 3, sd=0.2)], noise=1e-4)
    mean, sd = model.predict(model.guess, np.array([1.5, 0, 0]), np.array([0]), np.array([1, 2]))
    np.testing.assert_allclose(mean, 1.5, rtol=1e-4)
    np.testing.assert_allclose(sd**2, [0.04, 0.12], rtol=1e-3)


def test_the_fit_ends_where_no_parameter_can_be_bettered():
    """Derivatives, of a shape too, are those of finite differences: else the search would end elsewhere."""
    x, y = random_values()
    groups = list("abcd" * 6)
    bent = lambda shape: np.log1p(np.exp(shape + x))  # noqa: E731
    terms = [Term(np.ones(24), groups, 0.3), Term(bent, None, 0.5), Term(bent, groups, 0.2)]
    model = MixedModel(terms, [RandomWalk(x, groups, 0.1)], shapes=(-0.5,), noise=0.2)
    rows = np.arange(24)
    best = model.fit(y, rows)

    def posterior(parameters):
        again = MixedModel(
            [replace(term, sd=math.exp(p)) for term, p in zip(terms, parameters[:3], strict=True)],
            [RandomWalk(x, groups, math.exp(parameters[3]))],
            shapes=(parameters[5],),
            noise=math.exp(parameters[4]),
        )
        covariance = again._parts(again.guess, rows, rows).total()
        likelihood = -0.5 * y @ np.linalg.solve(covariance, y) - 0.5 * np.linalg.slogdet(covariance)[1]
        return likelihood - 0.5 * ((parameters - model.guess) ** 2).sum()

    for place in range(6):
        for step in (-0.05, 0.05):
            assert posterior(best + step * np.eye(6)[place]) < posterior(best)


def test_the_public_rows_are_whole():
    families = by_family(public_rows())
    assert (len(public_rows()), len(families)) == (110, 40)
    assert all(len(family) > 1 for family in families.values())
    for row in public_rows():
        assert row.measured
        assert row.samples / row.throughput_per_s < 1.02 * row.run_s
        if row.benchmark == "resnet":
            assert row.samples / row.epochs == pytest.approx(1_281_167, rel=1e-3)
    sentences = {row.samples / row.epochs for row in public_rows() if row.benchmark == "transformer"}
    assert max(sentences) == pytest.approx(min(sentences), rel=1e-3)


def test_more_accelerators_are_faster_and_what_is_further_is_less_certain():
    asked = asked_rows([ROW], [(16, None), (256, None), (4096, 65536.0)])
    assert [row.batch for row in asked] == [6528, 104448, 65536]
    found = [intervals(one) for one in forecasts([ROW, *asked])]
    rates = [one["throughput_per_s"] for one in found]
    assert rates[0].value < rates[1].value
    spreads = [math.log(one.high / one.low) for one in rates]
    assert spreads == sorted(spreads)
    assert 1 < rates[0].value / ROW.throughput_per_s < 2.2
    for one in found:
        run, step, updates = (one[name].value for name in ("run_s", "step_s", "updates"))
        assert run == pytest.approx(step * updates + one["around_s"].value)
        assert all(interval.low < interval.value < interval.high for interval in one.values())


def test_samples_that_are_given_are_not_predicted():
    asked = replace(ROW, accelerators=64, batch=8192, **UNKNOWN | {"samples": 55e6})
    (found,) = forecasts([ROW, asked])
    free = forecasts([ROW, replace(asked, samples=None)])[0]
    assert {"samples", "updates", "run_s"} & set(found.logs) == set()
    assert found.logs["run_s_of_samples"].sd < free.logs["run_s"].sd
    assert free.logs["epochs"].mean == pytest.approx(free.logs["samples"].mean - math.log(52_527_847 / 41))


def test_of_a_benchmark_that_nobody_knows_throughput_alone_is_predicted():
    ours = replace(ROW, benchmark="our own", **UNKNOWN | {"throughput_per_s": 100.0})
    (found,) = forecasts([ours, replace(ours, accelerators=64, batch=26112, throughput_per_s=None)])
    assert set(found.logs) == {"throughput_per_s", "step_s", "around_s"}


def test_nobody_is_predicted_from_himself():
    """A public family under another name is foretold as if it were not public."""
    family = by_family(public_rows())["v0.7/NVIDIA/dgxa100/resnet"]
    copied = [replace(family[0], family="ours"), replace(family[-1], family="ours", **UNKNOWN)]
    others = [row for row in public_rows() if row.family != "v0.7/NVIDIA/dgxa100/resnet"]
    as_told, left_out = forecasts(copied)[0], forecasts(copied, past=others)[0]
    assert as_told.logs["throughput_per_s"] == pytest.approx(left_out.logs["throughput_per_s"], rel=1e-6)
    known = [*public_rows(), *reference_rows(), copied[0]]
    from_himself = predicted(known, copied[1:], fitted(known))[0]
    assert from_himself.logs["throughput_per_s"] != pytest.approx(left_out.logs["throughput_per_s"], rel=1e-3)


@pytest.fixture(scope="module")
def families():
    return planner_families.study(lambda line: None)


@pytest.mark.slow
def test_the_widths_of_intervals_are_those_of_held_out_families(families):
    found = {known: {name: width(families.of(known, name)) for name in TRUTH} for known in (1, 2)}
    for known, widths in WIDTHS.items():
        assert found[known] == pytest.approx(widths, rel=0.02)


@pytest.mark.slow
def test_held_out_families_are_foretold_as_well_as_the_page_says(families):
    claims = planner_families.claims_of(families)
    assert all(claim.holds for claim in claims), [claim.claim for claim in claims if not claim.holds]


def test_a_family_that_is_held_out_teaches_nothing():
    """Twice the throughput of its larger systems changes no prediction, and every error by ln 2."""
    name = "v0.7/NVIDIA/dgxa100/ssd"
    rows = [row for row in public_rows() if row.benchmark in ("ssd", "resnet")]
    seen = by_family(rows)[name][0]
    changed = [
        replace(row, throughput_per_s=2 * row.throughput_per_s) if row.family == name and row != seen else row
        for row in rows
    ]
    parameters = fitted([*rows, *reference_rows()])
    first, second = (
        {
            one.row.accelerators: one
            for one in held_out(some, 1, parameters)
            if one.name == "throughput_per_s" and one.row.family == name
        }
        for some in (rows, changed)
    )
    assert len(first) == 3
    for size, one in first.items():
        assert second[size].predicted == pytest.approx(one.predicted)
        assert second[size].error == pytest.approx(one.error - math.log(2))


def test_medians_widths_and_coverage_are_counted_by_family():
    def one(family, error, sd=1.0):
        return HeldOut(replace(ROW, family=family), 1, "run_s", 1.0, sd, error)

    found = [one("a", 0.1), one("a", -0.3), one("a", 5.0), one("b", 1.0), one("c", -0.2)]
    assert median_of_families(found) == 0.3
    assert width([one("a", error, 0.5) for error in np.linspace(0, 1, 11)]) == pytest.approx(1.8)
    assert coverage([one("a", 0.5), one("b", -0.4), one("c", 10.0)]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no rows. Write \\[\\[row\\]\\] tables"),
        ("[[row]]\naccelerators = 8", "row 1: it says no batch"),
        ("[[row]]\naccelerators = 0\nbatch = 1", "accelerators is 0, and must be a whole number from 1 on"),
        ("[[row]]\naccelerators = 8\nbatch = -1", "batch is -1, and must be finite and above 0"),
        ("[[row]]\naccelerators = 8\nbatch = 1\nrun_s = inf", "run_s is inf"),
        ("[[row]]\naccelerators = 8\nbatch = 'many'", "batch is 'many', and must be a number"),
        ("[[row]]\naccelerators = 8\nbatch = 1\nthroughput = 3", "no field 'throughput'. Nearest: throughput_per_s"),
        ("[[row]]\nfamily = 3\naccelerators = 8\nbatch = 1", "family is 3, and must be text"),
        ("[[row]", "is no TOML"),
        ("row = 3", "holds no rows"),
        ("[[row]]\nbatch = 1\n[[row]]\naccelerators = 1", "(?s)row 1: .*row 2: "),
    ],
)
def test_rows_that_are_none_are_refused(text, message, tmp_path):
    file = tmp_path / "runs.toml"
    file.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_rows(file)


def test_rows_are_read_by_the_names_of_mlcommons_too(tmp_path):
    file = tmp_path / "runs.toml"
    file.write_text(
        '[[row]]\nfamily = "f"\nbenchmark = "bert"\nsystem = "4 boxes of H100"\naccelerators = 32\nnodes = 4\n'
        "global_batch = 448\ngradient_accumulation_steps = 2\nrun_s = [3.0, 1.0, 2.0]\n"
        '[[row]]\nbenchmark = "bert"\naccelerator = "TPU v5p"\naccelerators = 512\nnodes = 128\nbatch = 448\n'
        "[[row]]\naccelerators = 64\nbatch = 448\n"
    )
    first, second, third = read_rows(file)
    assert (first.scale_up, first.batch, first.accumulation, first.run_s, first.kind) == (8, 448, 2, 2.0, "gpu")
    assert (second.scale_up, second.boxes, second.kind, second.family) == (512, 1, "tpu", "bert")
    assert (third.scale_up, third.boxes) == (8, 8)


def test_questions_without_an_answer_are_refused():
    with pytest.raises(PlanError, match="all rows are measured"):
        forecasts([ROW])
    with pytest.raises(PlanError, match="no row of other is measured"):
        forecasts([ROW, replace(ROW, family="other", **UNKNOWN)])


def test_the_command_predicts_a_file(tmp_path):
    runs, out = tmp_path / "runs.toml", tmp_path / "out.toml"
    runs.write_text(
        '[[row]]\nfamily = "ours"\nbenchmark = "resnet"\naccelerator = "NVIDIA A100"\naccelerators = 8\nbatch = 3264\n'
        "throughput_per_s = 22525.2\nsamples = 52527847\nepochs = 41\nrun_s = 2366.7\n"
        '[[row]]\nfamily = "ours"\nbenchmark = "resnet"\naccelerator = "NVIDIA A100"\naccelerators = 768\n'
        "batch = 34560\n"
    )
    command = ["plan", "calibrate", "--from", str(runs), "--predict", "16,64:8192"]
    shown = CliRunner().invoke(cli, [*command, "--save", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "from 1 measured row" in shown.output
    rows = tomllib.loads(out.read_text())["row"]
    assert [(row["accelerators"], row["batch"]) for row in rows] == [(768, 34560), (16, 6528), (64, 8192)]
    # 1,258,510 samples/s and 63.4 s by the logs of v0.7.
    assert rows[0]["throughput_per_s"]["low"] < 1_258_510 < rows[0]["throughput_per_s"]["high"]
    assert rows[0]["run_s"]["low"] < 63.4 < rows[0]["run_s"]["high"]
    as_json = CliRunner().invoke(cli, [*command, "--json"])
    assert json.loads(as_json.stdout) == {"row": rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--predict", "64"], "--predict needs measured runs"),
        (["--from", "runs.toml", "--predict", "64:x"], "'64:x' is no size"),
        (["--from", "runs.toml", "--on", "dgx-a100"], "leave out FILE and --on"),
        (["--from", "missing.toml"], "No such file"),
        (["--from", "runs.toml", "--predict", "64", "--save", "none/out.toml"], "none is no folder to write in"),
        (["--save", "none/machine.json"], "none is no folder to write in"),
    ],
)
def test_commands_that_ask_nothing_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs.toml").write_text("[[row]]\naccelerators = 8\nbatch = 8\nthroughput_per_s = 1\n")
    refused = CliRunner().invoke(cli, ["plan", "calibrate", *arguments])
    assert refused.exit_code != 0
    assert message in refused.output + str(refused.exception)


def test_a_family_may_be_called_anything_and_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    runs, out = tmp_path / "runs.toml", tmp_path / "out.toml"
    runs.write_text('[[row]]\nfamily = "a[/b]c"\naccelerators = 8\nbatch = 8\nthroughput_per_s = 1\n')
    out.write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    command = ["plan", "calibrate", "--from", str(runs), "--predict", "64"]
    refused = CliRunner().invoke(cli, [*command, "--save", str(out)])
    assert "No space left on device. The predictions are not saved" in str(refused.exception)
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.toml", "runs.toml"]
    assert "a[/b]c" in CliRunner().invoke(cli, command).output
