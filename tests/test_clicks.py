"""Click logs: parsing, preparing, resuming, reading, generating; and a run on them with AUC."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data.clicks import prepare as preparing
from multipod.data.clicks.prepare import Settings, prepare
from multipod.data.clicks.records import Clicks
from multipod.data.clicks.synthetic import Synthetic, criteo_lines
from multipod.data.clicks.text import DENSE, FIELDS, parse
from multipod.errors import DataError
from multipod.layout.mesh import make_mesh
from multipod.metrics.ranking import auc
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.train.context import RunContext
from multipod.train.evaluation import evaluate
from multipod.train.loop import train

ROWS = (1000,) * FIELDS
SPEC = Synthetic(rows=(3000, 40, 5), examples=2000, tests=500)


def line(label="1", counts=None, fields=None) -> bytes:
    counts, fields = counts or ["3"] * DENSE, fields or ["0000beef"] * FIELDS
    return "\t".join([label, *counts, *fields]).encode() + b"\n"


def slow(text: bytes) -> list[tuple[int, list[int], list[int]]]:
    """The plain parser."""
    found = []
    for raw in text.decode().splitlines():
        label, *rest = raw.split("\t")
        found.append((int(label), [int(n or 0) for n in rest[:DENSE]], [int(v or "0", 16) for v in rest[DENSE:]]))
    return found


@pytest.fixture(scope="module")
def text() -> bytes:
    return b"".join(criteo_lines(SPEC, 3000, block=700))


def test_lines_by_hand():
    counts = ["", "-5", "0", "2147483647", "-2147483648", *["7"] * 8]
    fields = ["", "ffffffff", "80000000", "DeadBeef", "1", *["0000000a"] * 21]
    lines = parse(line("0", counts, fields) + line().replace(b"\n", b"\r\n"))
    assert lines.labels.tolist() == [0, 1]
    assert lines.counts[0].tolist()[:5] == [0, -5, 0, 2**31 - 1, -(2**31)]
    assert lines.fields[0].tolist()[:6] == [0, 2**32 - 1, 2**31, 0xDEADBEEF, 1, 10]
    assert lines.fields[1].tolist() == [0xBEEF] * FIELDS
    assert not lines.codes.any()


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (line().replace(b"\t", b" ", 1), 1),
        (b"\n", 1),
        (line("2"), 2),
        (line(""), 2),
        (line(counts=["x", *["3"] * 12]), 3),
        (line(counts=["-", *["3"] * 12]), 3),
        (line(counts=["2147483648", *["3"] * 12]), 3),
        (line(counts=["123456789012345678901234", *["3"] * 12]), 3),
        (line(fields=["xyz", *["0"] * 25]), 4),
        (line(fields=["123456789", *["0"] * 25]), 4),
        (bytes(range(128, 256)) + b"\n", 1),
    ],
)
def test_malformed_lines_are_told_and_left_out(bad, code):
    lines = parse(line() + bad + line("0"))
    assert lines.codes.tolist() == [0, code, 0]
    assert lines.labels.tolist() == [1, 0]


def test_parsing_equals_the_plain_parser(text):
    lines = parse(text)
    found = list(zip(lines.labels.tolist(), lines.counts.tolist(), lines.fields.tolist(), strict=True))
    assert found == slow(text)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_never_breaks_the_parser(raw):
    lines = parse(line() + raw.replace(b"\n", b"\t") + b"\n")
    assert len(lines) == 2
    assert lines.codes[0] == 0


def test_records_are_the_lines(text, tmp_path):
    (tmp_path / "train.txt").write_bytes(text)
    said = []
    asked = Settings((str(tmp_path / "train.txt"),), ROWS, "modulo", part_lines=900)
    found = prepare(asked, tmp_path / "out", lambda *now: said.append(now))
    assert found == {"examples": 3000, "lines": 3000, "malformed": 0}
    assert said[-1][1] == said[-1][2] == len(text)
    clicks = Clicks(str(tmp_path / "out"))
    train, test, validation = clicks.train(), clicks.test(), clicks.validation()
    assert (len(train), len(test), len(validation)) == (2572, 214, 214)
    expected = slow(text)
    for source, first in ((train, 0), (test, 2572), (validation, 2786)):
        numbers = np.array([len(source) - 1, 0, 7, 7])
        batch = source.read(numbers)
        for row, number in enumerate(numbers):
            label, counts, values = expected[first + number]
            assert batch["label"][row] == label
            np.testing.assert_allclose(batch["dense"][row], np.log1p(np.maximum(counts, 0)), rtol=1e-6)
            assert batch["ids"][row].tolist() == [value % 1000 for value in values]
    assert [batch[name].dtype for name in ("label", "dense", "ids")] == [np.int32, np.float32, np.int32]


def test_days_and_compressed_files(text, tmp_path):
    (tmp_path / "day_0").write_bytes(text)
    (tmp_path / "day_1.gz").write_bytes(gzip.compress(text[: text.index(b"\n", 20_000)]))  # without its last line's end
    prepare(Settings((str(tmp_path / "day_0"), str(tmp_path / "day_1.gz")), ROWS), tmp_path / "out")
    clicks = Clicks(str(tmp_path / "out"))
    last = clicks.description["days"][1]
    assert clicks.description["days"][0] == len(clicks.train()) == 3000
    assert len(clicks.test()) == -(-last // 2)
    same = clicks.train().read(np.arange(5)), clicks.test().read(np.arange(5))
    assert all(np.array_equal(same[0][name], same[1][name]) for name in ("label", "dense", "ids"))


def test_hashed_ids_are_spread_and_within_their_tables():
    rows = tuple(range(2, 2 + FIELDS))
    mapping = preparing._Mapping(Settings((__file__,), rows))
    values = np.arange(20_000, dtype=np.uint32)[:, None].repeat(FIELDS, 1)
    ids = mapping.ids(values)
    for field, n in enumerate(rows):
        counts = np.bincount(ids[:, field], minlength=n)
        assert len(counts) == n
        assert counts.min() > 0.8 * 20_000 / n


def test_frequent_values_get_rows_of_their_own(tmp_path):
    values = ["aa"] * 5 + ["bb"] * 3 + ["cc"] * 2 + ["dd"] * 4
    body = b"".join(line(fields=[value] * FIELDS) for value in values)
    (tmp_path / "t.txt").write_bytes(body)
    prepare(Settings((str(tmp_path / "t.txt"),), (4,) * FIELDS, "frequent", threshold=3, days=2), tmp_path / "out")
    clicks = Clicks(str(tmp_path / "out"))
    whole = replace(clicks.train(), count=14)
    assert whole.read(np.arange(14))["ids"][:, 25].tolist() == [1] * 5 + [2] * 3 + [0] * 2 + [3] * 4
    assert clicks.rows == (4,) * FIELDS
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["clicks.json", "part-00000.bin"]


@pytest.mark.parametrize("ids", ["hash", "frequent"])
def test_an_interrupted_run_goes_on(ids, text, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK", 8_000)
    monkeypatch.setattr(preparing, "SKETCH", 4096)
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt").write_bytes(text[: text.index(b"\n", 100_000) + 1])
    asked = Settings((str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), ROWS, ids, threshold=4, part_lines=400)
    whole = prepare(asked, tmp_path / "whole")

    class Stop(Exception):
        pass

    for after in (5, 7, 3):  # chunks until the next interruption
        left = iter(range(after))

        def interrupt(*now, left=left):
            if next(left, None) is None:
                raise Stop

        with pytest.raises(Stop):
            prepare(asked, tmp_path / "out", interrupt)
    assert prepare(asked, tmp_path / "out") == whole
    one, other = Clicks(str(tmp_path / "whole")), Clicks(str(tmp_path / "out"))
    assert one.description["days"] == other.description["days"]
    for name in ("label", "dense", "ids"):
        every = np.arange(len(one.train()))
        assert np.array_equal(one.train().read(every)[name], other.train().read(every)[name])


def test_a_full_disk_is_told_and_gone_on_from(text, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(text)
    asked = Settings((str(tmp_path / "a.txt"),), ROWS, part_lines=500)
    monkeypatch.setattr(preparing, "CHUNK", 50_000)
    write, parts = preparing._write_part, []

    def full(folder, progress, records):
        parts.append(1)
        if len(parts) == 3:
            raise OSError(28, "No space left on device")
        write(folder, progress, records)

    monkeypatch.setattr(preparing, "_write_part", full)
    with pytest.raises(DataError, match=r"No space left on device. Make room and start the same command again"):
        prepare(asked, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["progress"]["lines"] > 900
    assert prepare(asked, tmp_path / "out")["examples"] == 3000


def test_too_many_malformed_lines_stop_the_run(text, tmp_path):
    (tmp_path / "bad.txt").write_bytes(text[: text.index(b"\n", 50_000) + 1] + line("7") + b"\x00\xff\xfe" * 50)
    asked = Settings((str(tmp_path / "bad.txt"),), ROWS)
    with pytest.raises(DataError) as raised:
        prepare(asked, tmp_path / "out")
    said = str(raised.value)
    number = text[:50_000].count(b"\n") + 2
    assert "2 of " in said
    assert f"bad.txt:{number}: label not 0 or 1" in said
    assert f"bad.txt:{number + 1}: not 40 columns" in said
    found = prepare(replace(asked, bad_share=0.5), tmp_path / "other")
    assert found["malformed"] == 2
    assert len(Clicks(str(tmp_path / "other")).description["named"]) == 2


def test_a_line_without_end_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK", 1000)
    (tmp_path / "bad.txt").write_bytes(b"\x01" * 10_000 + b"\n" + line() * 9)
    found = prepare(Settings((str(tmp_path / "bad.txt"),), ROWS, bad_share=1.0), tmp_path / "out")
    assert found["examples"] == 9


def test_a_truncated_compressed_file_is_told(text, tmp_path):
    (tmp_path / "day.gz").write_bytes(gzip.compress(text)[:-5000])
    with pytest.raises(DataError, match=r"day.gz is damaged or ends early"):
        prepare(Settings((str(tmp_path / "day.gz"),), ROWS), tmp_path / "out")


def test_folders_that_do_not_fit(text, tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "CHUNK", 50_000)
    (tmp_path / "a.txt").write_bytes(text)
    asked = Settings((str(tmp_path / "a.txt"),), ROWS, part_lines=500)
    count = iter(range(4))

    def interrupt(*now):
        if next(count, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(asked, tmp_path / "out", interrupt)
    with pytest.raises(DataError, match=r"was begun with other arguments: ids, part_lines"):
        prepare(replace(asked, ids="modulo", part_lines=5), tmp_path / "out")
    prepare(asked, tmp_path / "out")
    with pytest.raises(DataError, match=r"holds finished records already"):
        prepare(asked, tmp_path / "out")
    part = tmp_path / "out" / "part-00001.bin"
    part.write_bytes(part.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"part-00001.bin has [\d,]+ bytes, not [\d,]+"):
        Clicks(str(tmp_path / "out")).train()
    part.unlink()
    with pytest.raises(DataError, match=r"part-00001.bin is missing"):
        Clicks(str(tmp_path / "out")).train()
    with pytest.raises(DataError, match=r"has no readable clicks.json"):
        Clicks(str(tmp_path)).train()


def test_ids_outside_a_table_are_told_with_the_field(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(text)
    prepare(Settings((str(tmp_path / "a.txt"),), ROWS), tmp_path / "out")
    small = replace(Clicks(str(tmp_path / "out")).train(), rows=(5, *ROWS[1:]))
    with pytest.raises(DataError, match=r"field 1 of example \d+ has id \d+, outside its 5 rows"):
        small.read(np.arange(50))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"files": ()}, "no files"),
        ({"files": ("/no/such",)}, "there is no file /no/such"),
        ({"rows": (5, 5)}, "rows are 2 numbers, not 26"),
        ({"days": 1, "threshold": 0}, r"threshold=0 \(at least 1\); days=1 \(at least 2\)"),
        ({"bad_share": 2.0}, "bad_share=2.0 is no share"),
    ],
)
def test_settings_that_cannot_be(fields, said):
    with pytest.raises(DataError, match=said):
        Settings(**({"files": (__file__,), "rows": ROWS} | fields))


@pytest.mark.parametrize("truth", ["structured", "unstructured"])
def test_generated_clicks_have_the_truth_they_say(truth):
    spec = Synthetic(rows=(3000, 1000, 40), examples=1000, tests=40_000, truth=truth)
    labels, probability = spec.best()
    assert labels.mean() == pytest.approx(0.3, abs=0.02)
    order = np.argsort(probability)
    for part in np.array_split(order, 5):  # calibrated: it is the true probability
        assert labels[part].mean() == pytest.approx(probability[part].mean(), abs=0.03)
    # The expected area of the true probabilities: every pair, weighted by how likely it is.
    weights = np.concatenate([1 - probability, probability])
    best = auc(labels, probability)
    assert 0.6 < best < 0.9
    sample = np.random.default_rng(0).choice(40_000, 2000, replace=False)
    p = probability[sample]
    pairs = (p[:, None] > p[None]) + 0.5 * (p[:, None] == p[None])
    expected = (p[:, None] * (1 - p[None]) * pairs).sum() / (p[:, None] * (1 - p[None])).sum()
    assert best == pytest.approx(expected, abs=0.02)
    assert weights.sum() == pytest.approx(40_000)
    assert "probability" not in spec.train().arrays


def test_generated_ids_are_zipf_distributed():
    spec = Synthetic(rows=(5000,), examples=50_000, tests=10)
    counts = np.sort(np.bincount(spec.train().arrays["ids"][:, 0], minlength=5000))[::-1]
    expected = np.arange(1, 5001) ** -1.05
    expected *= 50_000 / expected.sum()
    np.testing.assert_allclose(counts[:10], expected[:10], rtol=0.1)
    with pytest.raises(DataError, match=r"rate=1.5 \(between 0 and 1\)"):
        Synthetic(rate=1.5)


def test_a_run_reports_auc_and_stops_at_its_target():
    recipe = load("dlrm-small")
    data = Synthetic(rows=(3000, 300, 8), examples=3000, tests=515)
    model = replace(recipe.model, rows=data.rows, bottom=(8,), top=(8,), features=8, tt_rows=3000, tt_rank=4)
    recipe = replace(
        recipe, data=data, model=model, target="auc >= 0.55", batch=200, updates=60, evaluate_every=10,
        evaluation_batch=64, checkpoint_every=0, layout=replace(recipe.layout, mesh=(1, 2)),
    )  # fmt: skip
    program = program_of(recipe, make_mesh(recipe.layout))
    told = []
    state, ended = train(program, RunContext(observers=[told.append]))
    assert 0.55 <= ended.values["auc"] <= auc(*data.best()) + 0.05
    assert ended.update < 60
    assert not ended.interrupted
    assert ended.notes["tables"].startswith("1 of 3 as tensor trains, ")
    test = data.test().arrays
    logits, _ = model.apply(state.params, {}, test, train=False, key=None)
    assert evaluate(program, state, data.test())["auc"] == auc(test["label"], np.asarray(logits))


def test_the_command(multipod, tmp_path):
    made = multipod("clicks", "generate", "--out", "day.txt", "--examples", "500")
    assert made.returncode == 0, made.stderr
    done = multipod("clicks", "prepare", "day.txt", "--out", "records", "--rows", "100")
    assert done.stdout == "records: 500 examples of 500 lines, 0 malformed\n", done.stderr
    again = multipod("clicks", "prepare", "day.txt", "--out", "records", "--rows", "1,2")
    assert again.returncode == 2
    assert "rows are 2 numbers, not 26" in again.stderr
