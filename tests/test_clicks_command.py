"""What a user is told who gives `multipod clicks` and `multipod train` data that cannot be."""

import gzip
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from processes import clean_environment

from multipod.errors import DataError
from multipod.models.dlrm import Dlrm


def run(folder, command: str) -> subprocess.CompletedProcess:
    shell = command.replace("multipod", f"{sys.executable} -m multipod")
    return subprocess.run(
        ["bash", "-c", shell], cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With `day.txt`, 3,000 lines."""
    path = tmp_path_factory.mktemp("clicks")
    made = run(path, "multipod clicks generate --out day.txt --examples 3000")
    assert made.returncode == 0, made.stderr
    return path


def test_a_disk_that_is_full_is_told_and_the_same_command_goes_on(folder):
    again = "multipod clicks prepare day.txt --out full --rows 60 --part-lines 1000"
    full = run(folder, f"ulimit -f 200; {again}")
    assert full.returncode == 2
    assert full.stderr == (
        "multipod: full: File too large. Make room and start the same command again: it goes on behind the last part.\n"
    )
    done = run(folder, again)
    assert (done.returncode, done.stdout) == (0, "full: 3,000 examples of 3,000 lines, 0 malformed\n"), done.stderr


def test_garbage_and_truncated_files_are_told(folder):
    (folder / "garbage.txt").write_bytes(np.random.default_rng(0).bytes(20_000))
    (folder / "cut.gz").write_bytes(gzip.compress((folder / "day.txt").read_bytes())[:40_000])
    said = run(folder, "multipod clicks prepare garbage.txt --out a; multipod clicks prepare cut.gz --out b; exit $?")
    assert said.returncode == 2
    assert "lines are malformed, more than 0.10%. The first are\n  garbage.txt:1: not 40 columns\n" in said.stderr
    assert "Mend the files, or allow a larger share of malformed lines.\n" in said.stderr
    assert "multipod: cut.gz is damaged or ends early: " in said.stderr
    assert "Traceback" not in said.stderr


@pytest.mark.slow
def test_training_on_ids_outside_a_table_names_the_id_and_the_table(folder):
    (folder / "small.py").write_text(
        textwrap.dedent("""
        from dataclasses import replace
        from multipod.data.clicks.records import Clicks
        from multipod.models.dlrm import Dlrm
        from multipod.recipes.find import load
        def small():
            model = Dlrm(rows=(60,) * 2 + (5,) + (60,) * 23, bottom=(4,), top=(4,), features=4)
            return replace(load("dlrm-small"), data=Clicks("records"), model=model, batch=64, updates=2)
        """)
    )
    said = run(
        folder,
        "multipod clicks prepare day.txt --out records --rows 60 --quiet && "
        "multipod train small.py:small --out run --cpu-devices 1",
    )
    assert said.returncode == 2
    assert "recipe dlrm-small: Clicks and Dlrm differ. The data give batch['ids'][:, 2] ids up to 59" in said.stderr
    assert "and the model takes them up to 4. Set model.rows=60,60,60," in said.stderr


def test_the_table_of_an_id_with_several_ids_a_field():
    model = Dlrm(rows=(9, 4), hots=(2, 3))
    ids = np.zeros((2, 5), np.int32)
    model.check_batch({"ids": ids})
    ids[1, 3] = -1
    with pytest.raises(
        DataError, match=r"table 1: id -1 in row 1 of a batch is outside its 4 rows, the first of 1 such"
    ):
        model.check_batch({"ids": ids})
