"""The wheel: it holds what it should, installs beside nothing else, and runs README's script where no checkout is."""

import email
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

import fsharding as fs

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SECONDS = 100


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (file,) = folder.glob("*.whl")
    return file


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.namelist(), email.message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_alone(wheel):
    names, metadata = metadata_of(wheel)
    assert metadata["Version"] == fs.__version__ == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {name.partition("/")[0] for name in names} == {"fsharding", f"fsharding-{fs.__version__}.dist-info"}
    assert "fsharding/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsharding").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_links_of_the_readme_lead_somewhere():
    """They are relative, since the project has no address yet, and lead to files of the source distribution."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", readme)
    inside = [link for link in links if "://" not in link]
    assert inside
    assert [link for link in inside if not (ROOT / link).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {f"/{link.partition('/')[0]}" for link in inside} <= {*packed}


def test_readmes_script_runs_from_the_wheel_alone(wheel, tmp_path):
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(site), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, timeout=SECONDS)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "script.py").write_text(script + "print(fs.__version__, fs.__file__)\n", encoding="utf-8")
    # -S leaves out what an editable install has put into site-packages, whose other packages are named by path.
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    run = subprocess.run(
        [sys.executable, "-S", "script.py"], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [fs.__version__, str(site / "fsharding" / "__init__.py")]
