"""The commands, end to end: plain words, JSON, exit codes, one line of error."""

import importlib.util
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from model_support import DATA, GIB, generated

from cachexfs.cli.main import run
from cachexfs.errors import CacheXError
from cachexfs.model.commands import register
from cachexfs.model.fitted import fit
from cachexfs.model.store import save_model
from cachexfs.model.units import Duration, Size, size_text, time_text

VAST = str(DATA / "vast_eval_writes.csv.gz")
SERIES = ["--where", "series=vast/aged/xfer1024KiB"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    save_model(fit(generated(system="lab")), tmp_path / "m.json")
    return str(tmp_path / "m.json")


def call(*args: str) -> Result:
    group = click.Group()
    register(group)
    return CliRunner().invoke(group, list(args))


def code_of(result: Result) -> int:
    return result.exception.exit_code if isinstance(result.exception, CacheXError) else result.exit_code


def test_register_adds_exactly_the_seven() -> None:
    group = click.Group()
    register(group)
    assert sorted(group.commands) == ["advise", "exposure", "fit", "predict", "probe", "report", "simulate"]
    for name in group.commands:
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "--json" in result.output


def test_probe_fit_predict_advise_report(tmp_path: Path) -> None:
    probe, model, page = (str(tmp_path / n) for n in ("p.json", "m.json", "r.html"))
    place = tmp_path / "d"
    place.mkdir()
    result = call("probe", str(place), "--size", "64K", "--repeats", "3", "-o", probe, "--json", "--writers", "1,2,3,4")
    assert result.exit_code == 0, result.output
    assert [row["writers"] for row in json.loads(result.output)["levels"]] == [1, 2, 3, 4]
    assert list(place.iterdir()) == []
    fitted = call("fit", probe, "-o", model, "--json")
    assert json.loads(fitted.output)["rows"] == 12
    job = ["--writers", "4", "--size", "64K", "--nodes", "2", "--partner-rate", "1G"]
    assert code_of(call("predict", model, "--writers", "4", "--size", "64K")) in (0, 4)  # tmpfs may be too noisy
    assert code_of(call("advise", model, *job)) in (0, 4)
    assert call("report", model, "--data", probe, *job, "-o", page).exit_code == 0
    assert Path(page).stat().st_size > 10_000


def test_fit_of_real_data_says_what_it_found(tmp_path: Path) -> None:
    result = call("fit", VAST, *SERIES, "-o", str(tmp_path / "m.json"))
    assert result.exit_code == 0
    assert "100 checkpoints, 8 levels of 1 to 128 writers" in result.output
    assert "check: fitted on up to half" in result.output
    assert "not predicted, counted" in result.output


def test_predict_in_words_and_json(model: str) -> None:
    words = call("predict", model, "--writers", "128", "--size", "1G")
    assert words.exit_code == 0
    assert "80% interval" in words.output
    assert "rare extreme stragglers are not predicted" in words.output
    answer = json.loads(call("predict", model, "--writers", "128", "--size", "1G", "--json").output)
    low, high = answer["interval95_s"]
    assert low < answer["slowest_median_s"] < high
    busy = json.loads(call("predict", model, "--writers", "128", "--size", "1G", "--load", "0.5", "--json").output)
    assert busy["slowest_median_s"] > 1.5 * answer["slowest_median_s"]


def test_predict_tells_every_boundary(model: str) -> None:
    args = ["predict", model, "--writers", "128", "--size", "1G", "--partner-rate", "1G"]
    words = call(*args).output.splitlines()
    assert words[-2].startswith("partner route: returned")
    assert "restartable at pfs" in words[-1]
    by_route = json.loads(call(*args, "--json").output)["boundaries"]
    assert list(by_route["partner"]) == ["returned", "partner", "restartable at partner", "pfs", "restartable at pfs"]
    assert list(by_route["direct"]) == ["returned", "pfs", "restartable at pfs"]
    for times in by_route.values():
        medians = [t["median_s"] for t in times.values()]
        assert medians == sorted(medians)
        assert all(t["p95_s"] > t["median_s"] for t in times.values())


def test_predict_abstains_without_numbers(model: str) -> None:
    result = call("predict", model, "--writers", "100000", "--size", "1G")
    assert code_of(result) == 4
    assert "8 times away" in str(result.exception)
    assert result.output == ""
    silent = call("predict", model, "--writers", "100000", "--size", "1G", "--json")
    assert silent.exit_code == 4
    answer = json.loads(silent.output)
    assert answer["answer"] == "abstain"
    assert answer["slowest_median_s"] is None
    forced = call("predict", model, "--writers", "100000", "--size", "1G", "--anyway")
    assert forced.exit_code == 4
    assert "doubt:" in forced.output


def test_advise_speaks_three_lines(model: str) -> None:
    result = call(
        "advise", model, "--writers", "64", "--size", "1G", "--nodes", "1000", "--partner-rate", "2G", "--gpus", "4000"
    )
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split(":")[0] for line in lines] == ["Route", "Interval", "Why"]
    assert lines[0].startswith("Route: partner (cheaper with probability more than 0.99")
    assert "GPU-hours" in lines[2]
    assert "not predicted" in lines[2]


def test_advise_prefers_direct_when_the_partner_is_slow(model: str) -> None:
    result = call(
        "advise",
        model,
        "--writers",
        "16",
        "--size",
        "1G",
        "--nodes",
        "10",
        "--partner-rate",
        "100M",
        "--stall-direct",
        "0.5s",
        "--stall",
        "0.5s",
    )
    assert result.output.startswith("Route: direct")


def test_advise_abstains_on_an_unmeasured_partner(model: str) -> None:
    result = call("advise", model, "--writers", "64", "--size", "1G", "--nodes", "1000")
    assert result.exit_code == 4
    assert result.output.startswith("Route: cannot tell; use partner (the default) because the copy to the partner was")
    answer = json.loads(call("advise", model, "--writers", "64", "--size", "1G", "--nodes", "1000", "--json").output)
    assert answer["route"] == "abstain"
    assert answer["interval_s"] > 0


def test_advise_with_a_measured_partner(model: str, tmp_path: Path) -> None:
    save_model(fit(generated(together=1e5 * GIB, alone=2 * GIB)), tmp_path / "partner.json")
    result = call(
        "advise",
        model,
        "--writers",
        "64",
        "--size",
        "1G",
        "--nodes",
        "1000",
        "--partner",
        str(tmp_path / "partner.json"),
    )
    assert result.output.startswith("Route: partner")


def test_advise_does_not_sound_sure_beyond_the_data(model: str) -> None:
    result = call("advise", model, "--writers", "9999", "--size", "1G", "--nodes", "1000", "--partner-rate", "2G")
    assert result.exit_code == 4
    assert "rests on a PFS time that the data do not carry" in result.output.splitlines()[1]


def test_exposure_in_words_and_json(model: str) -> None:
    result = call(
        "exposure", "--interval", "10min", "--durable", "60", "--spread", "0.4", "--gpus", "1000", "--step-time", "5"
    )
    assert result.exit_code == 0
    assert "at risk on average 6.08 min" in result.output
    assert "73 on average" in result.output
    assert "101 on average" in result.output
    of_model = call("exposure", "--interval", "600", "--model", model, "--writers", "64", "--size", "1G", "--json")
    assert 300 < json.loads(of_model.output)["mean_s"] < 320
    assert code_of(call("exposure", "--interval", "600")) == 2
    assert code_of(call("exposure", "--interval", "600", "--model", model)) == 2
    assert code_of(call("exposure", "--interval", "600", "--model", model, "--writers", "9999", "--size", "1G")) == 4


def test_simulate_all_policies() -> None:
    args = [
        "simulate",
        "--nodes",
        "10000",
        "--interval",
        "20min",
        "--days",
        "10",
        "--replicas",
        "2",
        "--state",
        "1:6h",
        "--state",
        "4:1h",
    ]
    words = call(*args)
    assert [line.split()[0] for line in words.output.splitlines()] == ["direct", "partner", "auto"]
    answer = json.loads(call(*args, "--json").output)["policies"]
    assert answer["partner"]["waste"] < answer["direct"]["waste"]


class Page(HTMLParser):
    """Collects what a browser would fetch or run, headings, and whether tags close."""

    VOID = ("meta", "line", "rect", "circle", "polyline", "polygon")

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "action")]
        self.fetched += [tag] if tag in ("script", "link", "iframe", "img") else []
        self.charts += tag == "svg"
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "h2":
            self.headings.append(data)


JOB = [
    "--writers",
    "256",
    "--size",
    "8G",
    "--nodes",
    "500",
    "--partner-rate",
    "1G",
    "--gpus",
    "2000",
    "--step-time",
    "3",
]


def test_report_is_one_page_that_fetches_nothing(tmp_path: Path) -> None:
    model, page = str(tmp_path / "m.json"), tmp_path / "r.html"
    call("fit", VAST, *SERIES, "-o", model)
    result = call("report", model, "--data", VAST, *SERIES, *JOB, "-o", str(page))
    assert result.exit_code == 0, result.exception
    text = page.read_text()
    parsed = Page()
    parsed.feed(text)
    assert parsed.stack == []
    assert parsed.fetched == []
    assert "url(http" not in text
    assert "nan" not in text.lower().replace("finance", "")
    assert parsed.headings == [
        "Time against writers",
        "One checkpoint",
        "Predicted against observed",
        "Boundaries of one checkpoint",
        "Training at risk",
        "Interval",
        "Route",
        "What this does not say",
    ]
    assert parsed.charts == 7


def test_report_without_data_and_beyond_reach_says_so(model: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    args = ["--writers", "99999", "--size", "1G", "--nodes", "5", "-o", str(page)]
    assert call("report", model, *args).exit_code == 0
    text = page.read_text()
    assert "Give --data" in text
    assert "The data do not carry this prediction" in text


def test_report_escapes_names(tmp_path: Path) -> None:
    save_model(fit(generated(system="<script>alert(1)</script>")), tmp_path / "m.json")
    page = tmp_path / "r.html"
    call("report", str(tmp_path / "m.json"), "--writers", "8", "--size", "1G", "--nodes", "5", "-o", str(page))
    assert "<script" not in page.read_text()


@pytest.mark.parametrize(
    "args",
    [
        ["fit", "nowhere.csv"],
        ["fit"],
        ["predict", "nowhere.json", "--writers", "4", "--size", "1G"],
        ["predict", "MODEL", "--writers", "0", "--size", "1G"],
        ["predict", "MODEL", "--writers", "4", "--size", "-5"],
        ["predict", "MODEL", "--writers", "4", "--size", "nan"],
        ["predict", "MODEL", "--writers", "4", "--size", "1G", "--load", "1.0"],
        ["predict", "MODEL", "--writers", "4", "--size", "0"],
        ["fit", "VAST", "--where", "nonsense"],
        ["fit", "VAST", "--where", "nope=1"],
        ["fit", "VAST", "--where", "system=none"],
        ["fit", "VAST", "-o", "/no/such/dir/m.json"],
        ["probe", "/no/such/dir"],
        ["probe", ".", "--writers", "x"],
        ["probe", ".", "--writers", "0,1"],
        ["probe", ".", "--size", "1"],
        ["simulate", "--nodes", "10", "--interval", "60", "--direct", "x"],
        ["simulate", "--nodes", "10", "--interval", "60", "--direct", "1:2:3:4"],
        ["simulate", "--nodes", "10", "--interval", "60", "--state", "3"],
        ["simulate", "--nodes", "10", "--interval", "0"],
        ["simulate", "--nodes", "10000000", "--interval", "1ms", "--days", "36000"],
        ["advise", "MODEL", "--writers", "4", "--size", "1G", "--nodes", "0"],
        ["advise", "MODEL", "--writers", "4", "--size", "1G", "--nodes", "4", "--partner", "nowhere"],
        ["report", "MODEL", "--writers", "4", "--size", "1G", "--nodes", "4", "-o", "/no/such/dir/r.html"],
        ["exposure", "--interval", "600", "--durable", "1e300"],
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(
    args: list[str], model: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([{"MODEL": model, "VAST": VAST}.get(a, a) for a in args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("cachexfs: error: ")


def test_abstention_is_one_line_and_exit_4(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "\n".join(f"{n},1073741824,{1 + n / 7:.3f}" for n in (1, 2, 4, 8, 16) for _ in range(2))
    (tmp_path / "ten.csv").write_text(f"writers,bytes_per_writer,seconds\n{rows}\n")
    assert run(["fit", "ten.csv"]) == 4
    assert "only 10 rows" in capfd.readouterr().err
    assert run(["predict", "model.json", "--writers", "8", "--size", "1G"]) == 4
    out, err = capfd.readouterr()
    assert out == ""
    assert err == "cachexfs: error: cannot tell: only 10 rows; a model needs 12\n"


def test_without_numpy_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], model: str
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in ("numpy", "scipy") else real(name, *a)
    )
    for args in (
        ["fit", VAST],
        ["predict", model, "--writers", "4", "--size", "1G"],
        ["exposure", "--interval", "60", "--durable", "1"],
        ["simulate", "--nodes", "10", "--interval", "60"],
        ["advise", model, "--writers", "4", "--size", "1G", "--nodes", "4"],
        ["report", model, "--writers", "4", "--size", "1G", "--nodes", "4"],
    ):
        assert run(args) == 2
        assert f"numpy and scipy not installed: {sys.executable} -m pip install numpy scipy" in capfd.readouterr().err


def test_registering_does_not_import_numpy() -> None:
    code = "import sys, click; from cachexfs.model.commands import register; register(click.Group()); "
    code += "print('numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("64M", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        ("64MB", 64e6),
        ("1.5G", 1.5 * 2**30),
        ("2G/s", 2 * 2**30),
        ("1e3", 1000),
    ],
)
def test_sizes(text: str, value: float) -> None:
    assert Size().convert(text, None, None) == value


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90), ("90s", 90), ("1.5h", 5400), ("10min", 600), ("20ms", 0.02), ("5d", 432000)]
)
def test_durations(text: str, value: float) -> None:
    assert Duration().convert(text, None, None) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "5 parsecs", "-1", "nan", "inf", "0"])
def test_wrong_sizes_and_durations(text: str) -> None:
    for kind in (Size(), Duration()):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


def test_what_people_read() -> None:
    assert [size_text(v) for v in (12, 2048, 3 * 2**30)] == ["12 B", "2 KiB", "3 GiB"]
    assert [time_text(v) for v in (0.02, 5.0, 600.0, 7200.0, 1e9, float("inf"))] == [
        "20 ms", "5 s", "10 min", "2 h", "31.7 years", "never",
    ]  # fmt: skip
