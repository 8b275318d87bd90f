"""The rendered systemd units say what a node needs, and systemd agrees with them."""

import ast
import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest

from treadle_shared import NodeConfig, load_config
from treadle_shared.config import make_config
from treadle_shared.errors import EXIT_CONFIG
from treadle_shared.rundir import SYSTEM_DIR, RuntimeDir

ROOT = Path(__file__).parents[2]
BIN = "/opt/app/bin"
SERVICES = ("treadle-broker.service", "treadle-worker@.service", "treadle-drain.service")
DAEMONS = SERVICES[:2]
MAX_EXPOSURE = 1.5

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def load_renderer():
    spec = importlib.util.spec_from_file_location("render_units", ROOT / "systemd" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RENDERER = load_renderer()


@pytest.fixture(scope="module")
def files():
    return RENDERER.render(BIN)


@pytest.fixture
def installed(tmp_path):
    """The units as files, the template as an instance too, for a Python that is there."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to("/bin/true")
    files = RENDERER.render(str(tmp_path / "bin"))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "treadle-worker@cpu.service").write_text(files["treadle-worker@.service"])
    return tmp_path


def directives(text):
    """Every value of every directive, in order."""
    found = {}
    for line in text.splitlines():
        if re.match(r"[A-Z]\w*=", line):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def seconds(unit, key):
    return float(unit[key][-1])


# ---- rendering


def test_no_placeholder_is_left(files):
    assert not [name for name, text in files.items() if re.search(r"@[A-Z]+@", text)]


def test_another_node_shares_no_name_but_the_user(files):
    other = RENDERER.render(BIN, "lab")
    assert "lab-worker@.service" in other
    assert not [name for name in other if name.startswith("treadle")]
    for name in ("lab-broker.service", "lab-worker@.service", "lab-drain.service", "lab.target"):
        code = "\n".join(line for line in other[name].splitlines() if not line.startswith(("#", "Description=")))
        assert set(re.findall(r"\S*treadle\S*", code)) <= {
            "User=treadle",
            "Group=treadle",
            "treadle_broker",
            "treadle_worker",
            "treadle.cli",
            "/etc/lab/treadle.toml",
        }


@pytest.mark.parametrize("bin_dir", ["", "bin", "./bin", "/opt/my apps/bin", '/opt/"x"', "/opt/$HOME", "/opt\n/bin"])
def test_a_path_that_would_break_a_unit_is_refused(bin_dir):
    with pytest.raises(RENDERER.RenderError, match="BIN"):
        RENDERER.render(bin_dir)


@pytest.mark.parametrize("node", ["", "Lab", "a b", "../x", "1st", "x" * 32])
def test_a_node_name_that_would_break_a_unit_is_refused(node):
    with pytest.raises(RENDERER.RenderError, match="NODE"):
        RENDERER.render(BIN, node)


def test_a_percent_sign_is_not_taken_for_a_specifier():
    text = RENDERER.render("/opt/100%/bin/")["treadle-broker.service"]
    assert "ExecStart=/opt/100%%/bin/python -m" in text


def test_the_command_writes_every_file_and_names_it(files, tmp_path, capsys):
    assert RENDERER.main(["--bin", BIN, "--out", str(tmp_path / "new" / "units")]) == 0
    assert {path.name: path.read_text() for path in (tmp_path / "new" / "units").iterdir()} == files
    assert len(capsys.readouterr().out.splitlines()) == len(files)


def test_the_command_refuses_bad_arguments_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        RENDERER.main(["--bin", "relative", "--out", str(tmp_path / "units")])
    assert stopped.value.code == 2
    assert "BIN must be an absolute path" in capsys.readouterr().err
    assert not (tmp_path / "units").exists()


# ---- what the units say


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_notifies_is_watched_and_comes_back_but_never_from_a_bad_configuration(files, name):
    unit = directives(files[name])
    assert unit["Type"] == ["notify"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == [str(EXIT_CONFIG)]
    assert seconds(unit, "WatchdogSec") > 0
    assert seconds(unit, "RestartSec") > 0
    restarts_until_limit = seconds(unit, "StartLimitBurst") * seconds(unit, "RestartSec")
    assert restarts_until_limit < seconds(unit, "StartLimitIntervalSec")


@pytest.mark.parametrize("name", SERVICES)
def test_stopping_waits_longer_than_a_drain(files, name):
    assert seconds(directives(files[name]), "TimeoutStopSec") > NodeConfig().drain_timeout_s


def test_a_crashed_broker_does_not_unload_the_model(files):
    worker, broker = (directives(files[name]) for name in ("treadle-worker@.service", "treadle-broker.service"))
    assert worker["Wants"] == ["treadle-broker.service"]
    assert worker["After"] == ["treadle-broker.service"]
    assert not {"BindsTo", "Requires", "Requisite"} & (set(worker) | set(broker))
    assert worker["PartOf"] == broker["PartOf"] == ["treadle.target"]


def test_a_node_drains_before_its_worker_stops(files):
    """Units stop in reverse order, so the drain must start after both."""
    assert directives(files["treadle-drain.service"])["After"] == ["treadle-broker.service"]
    assert directives(files["treadle-worker@.service"])["Before"] == ["treadle-drain.service"]
    assert "treadle.cli drain" in directives(files["treadle-drain.service"])["ExecStop"][0]


@pytest.mark.parametrize("name", DAEMONS)
def test_the_runtime_directory_is_private_shared_and_outlives_either_process(files, name):
    unit = directives(files[name])
    assert f"/run/{unit['RuntimeDirectory'][0]}" == str(SYSTEM_DIR)
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert f"--runtime-dir {SYSTEM_DIR} --config /etc/treadle/treadle.toml" in unit["ExecStart"][0]
    assert unit["UMask"] == ["0007"]


def test_the_mode_of_the_runtime_directory_is_one_that_a_broker_accepts(files, tmp_path):
    modes = {directives(files[name])["RuntimeDirectoryMode"][0] for name in DAEMONS}
    modes.add(next(line.split()[2] for line in files["treadle.tmpfiles.conf"].splitlines() if "/run/treadle" in line))
    assert len(modes) == 1
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(int(modes.pop(), 8))
    RuntimeDir(tmp_path / "run").create()


def test_the_instance_of_a_worker_is_its_device(files):
    (setting,) = [v for v in directives(files["treadle-worker@.service"])["Environment"] if v.startswith("TREADLE_")]
    name, _, value = setting.partition("=")
    assert load_config(environ={name: value.replace("%i", "cuda0")}).device == "cuda0"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_unprivileged_and_can_start_a_zeromq_thread(files, name):
    unit = directives(files[name])
    assert unit["User"] == ["treadle"]
    assert unit["CapabilityBoundingSet"] == [""]
    for key in ("NoNewPrivileges", "MemoryDenyWriteExecute", "PrivateNetwork", "PrivateDevices", "ProtectHome"):
        assert unit[key] == ["yes"], key
    allowed = unit["SystemCallFilter"]
    assert allowed.index("sched_setscheduler") > allowed.index("~@privileged @resources")


def test_a_worker_may_pin_itself(files):
    assert directives(files["treadle-worker@.service"])["SystemCallFilter"][-1] == "sched_setaffinity"


def test_a_core_file_with_prompts_is_never_written(files):
    assert all(directives(files[name])["LimitCORE"] == ["0"] for name in SERVICES)


# ---- systemd's own opinion


def analyze(*arguments):
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


@needs_systemd
def test_verify_prints_nothing(installed):
    units = [*sorted(installed.glob("*.service")), *installed.glob("*.target")]
    result = analyze("verify", *units)
    assert (result.stdout + result.stderr, result.returncode) == ("", 0)


@needs_systemd
def test_verify_would_notice_a_mistake(installed):
    broker = installed / "treadle-broker.service"
    broker.write_text(broker.read_text().replace("WatchdogSec=10", "WatchdogSecs=10"))
    assert "WatchdogSecs" in analyze("verify", broker).stderr


@needs_systemd
def test_a_gpu_worker_verifies_too(files, installed):
    (installed / "treadle-worker@cpu.service.d").mkdir()
    (installed / "treadle-worker@cpu.service.d" / "gpu.conf").write_text(files["gpu.conf.example"])
    result = analyze("verify", installed / "treadle-worker@cpu.service")
    assert (result.stdout + result.stderr, result.returncode) == ("", 0)


@needs_systemd
@pytest.mark.parametrize("name", ["treadle-broker.service", "treadle-worker@cpu.service", "treadle-drain.service"])
def test_exposure_is_small(installed, name):
    result = analyze("security", "--offline=true", f"--threshold={int(10 * MAX_EXPOSURE)}", installed / name)
    assert result.returncode == 0, result.stdout
    exposure = re.search(r"Overall exposure level for \S+: ([0-9.]+)", result.stdout)
    assert float(exposure[1]) <= MAX_EXPOSURE


# ---- the example configuration and its page


def test_the_example_configuration_is_valid(files, tmp_path):
    example = tmp_path / "treadle.toml"
    example.write_text(files["treadle.toml.example"])
    config = load_config(example, environ={})
    assert config.log_format == "json"
    assert config.model.startswith("/var/lib/treadle/models/")


def test_every_line_of_the_example_is_valid_when_it_is_taken_up(files):
    text = re.sub(r"^#(\w+ =)", r"\1", files["treadle.toml.example"], flags=re.MULTILINE)
    settings = tomllib.loads(text)
    assert len(settings) > 20
    make_config(settings)


def documented():
    """Key and default of each row of the configuration table."""
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", page, flags=re.MULTILINE)
    return {key: default.strip() for key, default in rows}


def test_every_key_is_documented_with_its_default():
    defaults = msgspec.structs.asdict(NodeConfig())
    table = documented()
    assert list(table) == list(defaults)
    for key, text in table.items():
        value = defaults[key]
        if value is None:
            assert text.startswith("derived"), key
        else:
            assert ast.literal_eval(text.strip("`")) == value, key
