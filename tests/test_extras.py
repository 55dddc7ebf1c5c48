"""Without optional packages everything else works, and what needs one says which extra brings it."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from processes import clean_environment
from tiny_recipe import tiny
from tree_names import PACKAGE, ROOT, code_files, parse

from multipod import runs
from multipod.cli.launching.manifests.kubernetes import to_yaml
from multipod.cli.main import cli
from multipod.data.files.array_record import write_array_record
from multipod.data.files.hub import open_hub
from multipod.data.files.parquet import write_parquet
from multipod.data.files.tfrecord import write_tfrecord
from multipod.data.grain_pipelines import ExactlyOnce
from multipod.data.images.decode import decode
from multipod.data.stdlib_text import train_tokenizer
from multipod.errors import MissingPackageError
from multipod.extras import EXTRA_OF, pip_install
from multipod.interop.weights.files import read_weights, write_weights
from multipod.metrics.answers import ANSWER_METRICS
from multipod.metrics.bleu import bleu
from multipod.metrics.coco import Detections, average_precision
from multipod.metrics.coco_masks import encode_masks
from multipod.micro.exporter import export
from multipod.mlperf.check import official
from multipod.plan.calibration.fit import fit

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIRED = {re.split(r"[><=\[]", line)[0] for line in PROJECT["dependencies"]}
BROUGHT = {"jaxlib": "jax", "ml_dtypes": "jax", "markupsafe": "jinja2"}
"""Packages that another one cannot be without."""
OWN = {"equinox", "keras", "mpi4py", "tensorflow", "torch"}
"""What only modules for its own users import."""
CHARTS = {"report.py", "charts.py", "tensorboard.py"}
"""Modules that are imported where their packages are installed alone."""
JAX_NEEDS = {"scipy", "yaml"}
"""Optional here, but no JAX, Flax or Orbax is without them."""


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def test_ten_packages_are_required():
    assert len(REQUIRED) <= 10


def test_each_extra_brings_its_packages():
    distributions = packages_distributions()
    for package, extra in EXTRA_OF.items():
        names = tuple(map(normal, distributions.get(package, [package])))
        assert any(normal(line).startswith(names) for line in EXTRAS[extra]), (package, extra)


def test_all_has_every_extra_of_a_user():
    (everything,) = EXTRAS["all"]
    named = {*re.search(r"\[(.*)\]", everything)[1].split(","), "comet", "mlflow", "trackio", "wandb", "coco"}
    builds = {"cuda12", "cuda13", "tpu"}
    workshop = {"bench", "dev", "docs", "keras", "micro", "mpi", "ray", "wheel"}
    assert named | builds | workshop | {"all"} == {*EXTRAS}


def test_every_package_that_is_imported_is_required_or_optional():
    """What is optional is imported inside functions; where a module as a whole needs it, the module is."""
    required = {normal(name) for name in REQUIRED} | {"orbax"}
    wrong = []
    for file in code_files("*.py", "src"):
        tree = parse(file)
        for node in ast.walk(tree):
            match node:
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.ImportFrom(module=str(module), level=0):
                    names = [module]
                case _:
                    continue
            own = file.is_relative_to(PACKAGE / "experiments") or file.name in CHARTS
            for package in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "multipod", *OWN}:
                known = normal(package) in required or package in BROUGHT
                if not known and (package not in EXTRA_OF or (node in tree.body and not own)):
                    wrong.append(f"{file.relative_to(PACKAGE)}:{node.lineno} imports {package}")
    assert wrong == []


ONE = np.zeros((2, 2))
TRUTH = {
    "images": [{"id": 1}],
    "categories": [{"id": 1}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9]}],
}
NOTHING = Detections(np.empty(0, int), np.empty((0, 4)), np.empty(0), np.empty(0, int))
WITHOUT = {
    "PIL": lambda: decode(b"GIF89a"),
    "array_record": lambda: write_array_record(Path("x"), []),
    "datasets": lambda: open_hub("hub:mnist:train"),
    "faster_coco_eval": lambda: average_precision(TRUTH, NOTHING),
    "flatbuffers": lambda: export(lambda x: x + x, ONE),
    "google_crc32c": lambda: write_tfrecord("x", []),
    "grain": lambda: ExactlyOnce(3)[0],
    "huggingface_hub": lambda: read_weights("hf:org/name"),
    "jinja2": lambda: invoke("report", "run"),
    "matplotlib": lambda: invoke("plan", "resnet50", "--on", "tpu-v3-pod", "--scale", "16..32", "--draw", "x.svg"),
    "mlperf_logging": lambda: official("compliance_checker.mlp_compliance"),
    "pyarrow": lambda: write_parquet(Path("x"), [{}]),
    "pycocotools": lambda: encode_masks(ONE[None], np.ones((1, 4)), 2, 2),
    "ray": lambda: invoke("launch", "--processes", "2", "--ray", "local", "--", "train", "digits"),
    "sacrebleu": lambda: bleu(["a"], [["a"]]),
    "safetensors": lambda: write_weights(Path("x.safetensors"), {}, {}),
    "scipy": lambda: fit(None, [], []),
    "sklearn": lambda: ANSWER_METRICS["matthews"](["a"], ["b"]),
    "tensorboardX": lambda: runs.train(tiny(), log="tensorboard"),
    "tokenizers": lambda: train_tokenizer([], 300),
    "wandb": lambda: runs.train(tiny(), log="csv,wandb"),
    "yaml": lambda: to_yaml({}),
}
"""What needs each package."""


def invoke(*words: str) -> None:
    CliRunner().invoke(cli, words, standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize("package", WITHOUT)
def test_what_needs_a_package_names_its_extra(package, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    command = re.escape(pip_install([EXTRA_OF[package]]))
    with pytest.raises(MissingPackageError, match=rf": {package} is not installed. {command}$"):
        WITHOUT[package]()


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Runs the command line in a process in which no optional package can be imported."""
    folder = tmp_path_factory.mktemp("bare")
    blocked = {*EXTRA_OF} - JAX_NEEDS
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n")
    environment = clean_environment() | {"PYTHONPATH": f"{folder}:{PACKAGE.parent}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "multipod", *words]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)

    return run


def test_a_run_trains_saves_and_says_once_what_was_left_out(bare, tmp_path):
    changes = ["--set", "updates=4", "--set", "evaluate_every=4"]
    done = bare("train", "digits", *changes, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "test accuracy" in done.stdout
    assert "report" not in done.stdout
    told = "multipod: left out report.html and tensorboard/. To have them: pip install 'multipod[report,tensorboard]'\n"
    assert done.stderr == told
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"checkpoints", "metrics.jsonl", "recipe.toml", "run.json"}
    assert (tmp_path / "run" / "checkpoints" / "4").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("list", "resnet50"),
        ("show ssd", "gradient sum"),
        ("plan transformer --on tpu-v3-pod:2x2 --batch 512", "layouts priced"),
        ("simulate all-reduce --on mesh:8x8 --bytes 100M", "detour-ring"),
        ("launch --processes 2 --render slurm -- train digits --out /shared/run", "srun"),
    ],
)
def test_what_needs_no_optional_package_works_without_them(bare, words, said):
    done = bare(*words.split())
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
