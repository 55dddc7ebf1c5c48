"""The settings that `doctor` prints: which are set, and that XLA knows them."""

import mmap
import re
from pathlib import Path

import jaxlib
import pytest
from click.testing import CliRunner

from multipod.cli.flags import SETTINGS, PlatformSetting
from multipod.cli.main import cli

FLAG = PlatformSetting("--xla_a", "XLA_FLAGS", "true", "", "")


@pytest.mark.parametrize(
    ("flags", "found"),
    [("", None), ("--xla_ab=1", None), ("--xla_a", "true"), ("--xla_a=1 --xla_a=2 --b", "2"), ("--xla_a='' ", "")],
)
def test_a_flag_is_found_in_its_variable_and_the_last_one_counts(flags, found):
    assert FLAG.found({"XLA_FLAGS": flags}) == found
    assert FLAG.found({"OTHER": "--xla_a=3"}) is None
    assert PlatformSetting("NCCL_DEBUG", "NCCL_DEBUG", "", "", "").found({"NCCL_DEBUG": "INFO"}) == "INFO"


def test_doctor_prints_what_is_set(monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_enable_async_all_gather=false")
    done = CliRunner().invoke(cli, ["doctor", "--flags-for", "tpu"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert re.search(r"xla_enable_async_all_gather \(in LIBTPU_INIT_ARGS\) *│ false *│ true", done.output)
    assert done.output.count("openxla.org/xla/flags_guidance") == len(SETTINGS["tpu"])


def test_xla_knows_its_flags():
    """XLA ends a process that names a flag it does not know."""
    with next(Path(jaxlib.__file__).parent.glob("libjax_common.*")).open("rb") as library:
        text = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ)
        for one in (one for settings in SETTINGS.values() for one in settings if one.variable == "XLA_FLAGS"):
            assert text.find(one.name.removeprefix("--").encode()) >= 0, one
